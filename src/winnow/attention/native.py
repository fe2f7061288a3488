"""Attention over a paged cache on the CPU: the C++ kernels of `native/`, called with addresses of tensors."""

from functools import cached_property

import torch
from torch import Tensor

from winnow.attention.interface import (
    AttentionBackend,
    AttentionSpec,
    BackendStep,
    NativeSpec,
    NativeStep,
    ReplayQueries,
    count_reads,
)
from winnow.attention.observer import AttentionObserver
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache
from winnow.cache.codec import BIAS, PairCodec, PlainCodec, rotation_block
from winnow.cache.formats import VectorFormat
from winnow.cache.layout import PAGE_ENTRIES
from winnow.cache.pool import KindPool
from winnow.cache.wide import WideWindow
from winnow.errors import ConfigError
from winnow.process import native
from winnow.values.value_tier import ValueTier


def native_cache(cache: PagedCache, pool: KindPool, heads: int) -> native.Cache:
    """Return the cache with the blocks of one kind, in layers of a number of heads."""
    layout, tables = cache.pool.layout, cache.tables
    _check_reads(pool.kind.codec)
    return native.Cache(
        native_pool(pool), pages=tables.pages.data_ptr(), page_table=tables.page_table.data_ptr(),
        lengths=tables.lengths.data_ptr(), num_layers=layout.num_layers, num_heads=heads,
        table_heads=layout.num_kv_heads, page_entries=PAGE_ENTRIES,
        pages_per_seq=tables.page_table.shape[1],
        windows=[_native_window(window) for window in cache.windows],
    )  # fmt: skip


def native_batch(spans: Spans) -> native.Batch:
    # By identity: sequences of a policy share theirs, and to hash each one's costs more than equals would.
    kinds = {id(kind): kind for kind in spans.observe if kind is not None}
    number = {kind: i for i, kind in enumerate(kinds)}
    return native.Batch(
        slots=spans.slots.tolist(), counts=spans.counts.tolist(), starts=spans.starts.tolist(),
        position=spans.position.data_ptr(), num_tokens=len(spans.position),
        observer=[-1 if kind is None else number[id(kind)] for kind in spans.observe],
        observe_from=spans.observe_from.tolist(),
        observers=[_native_observer(kind) for kind in kinds.values()], temporary=spans.temporary.tolist(),
    )  # fmt: skip


def _native_observer(observer: AttentionObserver) -> native.AttentionObserver:
    smoothing = observer.smoothing
    return native.AttentionObserver(
        terms=[native.Term[term.name.lower()] for term in observer.terms],
        group=native.Group[observer.group.name.lower()],
        exclude_first=observer.exclude_first,
        replace=observer.replace,
        smoothing_size=smoothing.size if smoothing else 0,
        smoothing_max=smoothing is not None and smoothing.kind == "max",
        smoothing_per_query_head=smoothing is not None and smoothing.per_query_head,
        smoothing_skip_window=smoothing is not None and smoothing.skip_window,
    )


def reads(*codecs: PairCodec) -> bool:
    forms = {form.name for codec in codecs for form in (codec.key, codec.value)}
    return forms <= {*native.FORMATS, "int4-outlier"}


def native_pool(pool: KindPool) -> native.Pool:
    """Return the pool, which kernels that do not read its codec still move. It points at the pool's tensors."""
    kind, numbers = pool.kind, pool.numbers
    codec = kind.codec
    plain = isinstance(codec, PlainCodec)
    keys = values = None
    if reads(codec) and not plain:
        keys = _coded_vectors(pool, "k", codec.key, codec.rotate_keys)
        values = _coded_vectors(pool, "v", codec.value, codec.rotate_values)
    return native.Pool(
        fields=[_native_field(x, pool.first) for x in pool.fields.values()],
        k=_address(pool.k, pool.first) if plain else 0, v=_address(pool.v, pool.first) if plain else 0,
        position=numbers.position.data_ptr(), accumulators=numbers.accumulators.data_ptr(),
        num_slots=numbers.position.numel(), num_accumulators=len(numbers.accumulators),
        block_size=kind.size, block_stride=pool.k.stride(0) if plain else 0, head_dim=kind.key_size,
        dtype=native.native_dtype(pool.k.dtype) if plain else native.DType.f32, keys=keys, values=values,
        bias=_native_field(pool.fields[BIAS.name], pool.first) if pool.has_bias else None,
    )  # fmt: skip


def key_rows(pool: KindPool, slot: Tensor, length: Tensor) -> native.KeyRows:
    """Return the keys in slots, int64 [..., N], of rows of `length`, int32 [...], both dense. Points at all three."""
    _check_reads(pool.kind.codec)
    return native.KeyRows(
        pool=native_pool(pool), slot=slot.data_ptr(), length=length.data_ptr(), rows=length.numel(),
        stride=slot.shape[-1],
    )  # fmt: skip


def _check_reads(codec: PairCodec) -> None:
    if not reads(codec):
        raise ConfigError(
            f"attention_backend native reads KVs stored as one of {', '.join(native.FORMATS)}, got {codec.name}"
        )


def _native_field(field: Tensor, first: int) -> native.Field:
    """Return a field of the blocks from `first` on, [num_blocks, block_size, length], as bytes."""
    size = field.itemsize
    return native.Field(_address(field, first), field.stride(1) * size, field.stride(0) * size)


def _address(field: Tensor, first: int) -> int:
    """Return where block 0 would lie, from which the kernels count, of a field of the blocks from `first` on."""
    return field.data_ptr() - first * field.stride(0) * field.itemsize


def _native_window(window: WideWindow) -> native.WideWindow:
    _, num_layers, num_heads, _, head_dim = window.k.shape
    return native.WideWindow(
        first_layer=window.layers.start, num_layers=num_layers, num_heads=num_heads, head_dim=head_dim,
        sinks=window.sinks, recent=window.recent, dtype=native.native_dtype(window.k.dtype),
        k=window.k.data_ptr(), v=window.v.data_ptr(), position=window.position.data_ptr(),
    )  # fmt: skip


def _coded_vectors(pool: KindPool, side: str, form: VectorFormat, rotated: bool) -> native.CodedVectors:
    """Return how the kernels read one side of the KVs; `side` is "k" or "v"."""
    nowhere = native.Field(0, 0, 0)
    found = {suffix: _native_field(pool.fields[f"{side}{suffix}"], pool.first) for suffix in form.suffixes}
    head_dim = pool.kind.key_size if side == "k" else pool.kind.value_size
    scale, outlier = pool.fields.get(f"{side}_scale"), pool.fields.get(f"{side}_outlier")
    return native.CodedVectors(
        format=native.FORMATS[form.name.removesuffix("-outlier")], code=found[""],
        group=head_dim if scale is None else head_dim // scale.shape[-1],
        scale=found.get("_scale", nowhere), min=found.get("_min", nowhere),
        num_outliers=0 if outlier is None else outlier.shape[-1], outlier=found.get("_outlier", nowhere),
        channel=found.get("_channel", nowhere), rotation=rotation_block(head_dim) if rotated else 1,
    )  # fmt: skip


class NativeBackend(AttentionBackend):
    """See `AttentionBackend`. Results do not depend on the number of threads."""

    def __init__(self, kernels: native.Kernels) -> None:
        self._kernels = kernels
        self._work = native.Workspace()

    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        return KernelStep(self._kernels, self._work, cache, spans)

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        source, target = source.contiguous(), target.contiguous()
        if len(pool.kinds) == 1:
            self._compact(pool.kinds[0], source, target)
            return
        for kind, mask in pool.split(source // pool.layout.block_size):
            self._compact(kind, source[mask], target[mask])

    def _compact(self, kind: KindPool, source: Tensor, target: Tensor) -> None:
        self._kernels.compact(
            native_pool(kind), source.data_ptr(), target.data_ptr(), len(source), torch.get_num_threads()
        )

    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        assert rows.score.shape[-1] == rows.block.shape[-1] * pool.layout.block_size, (
            "rows are padded to whole blocks"
        )
        for kind in pool.kinds:
            some, stay = rows, kept
            if len(pool.kinds) > 1:
                # A row of no KVs is of any kind, as nothing of it moves.
                mask = kind.covers(rows.block[..., 0])
                some, stay = rows[mask], kept[mask]
            score, must_stay = some.score.contiguous(), some.must_stay.contiguous()
            block, length, stay = some.block.contiguous(), some.length.contiguous(), stay.int().contiguous()
            self._kernels.keep_best(
                native_pool(kind), block.data_ptr(), length.data_ptr(), stay.data_ptr(), score.data_ptr(),
                must_stay.data_ptr(), length.numel(), score.shape[-1], torch.get_num_threads(),
            )  # fmt: skip


class KernelStep(BackendStep):
    """See `BackendStep` for shapes and meaning. Views of the cache are made when the first layer needs them."""

    def __init__(
        self, kernels: native.Kernels, work: native.Workspace, cache: PagedCache, spans: Spans
    ) -> None:
        super().__init__(cache, spans)
        self._kernels, self._work = kernels, work
        self._views: dict[tuple[int, int], native.Cache] = {}

    @cached_property
    def whole_layers(self) -> NativeStep | None:  # type: ignore[override]
        kinds, layout = self.cache.pool.kinds, self.cache.pool.layout
        if len(kinds) == 1 and kinds[0].tier is None and len(set(layout.heads)) == 1:
            return NativeStep(self._view(0), self._batch, self._work)
        tier = layout.value_tier
        if tier is None or len(kinds) > 2:
            return None
        near, far = kinds[0], kinds[-1]  # without near layers, which are none
        view, heads = self._view_of(near, layout.num_kv_heads), layout.num_kv_heads
        far_layers = native.FarLayers(cache=self._view_of(far, heads), first=tier.layers)
        selection = _native_selection(tier, self.spans)
        return NativeStep(view, self._batch, self._work, far_layers, selection, far.tier)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        pool = self.cache.pool
        shape = len(self.spans.position), pool.layout.heads[layer], pool.of_layer(layer).kind.key_size
        assert k.shape == v.shape == shape, f"k and v must be {shape}, got {tuple(k.shape)}, {tuple(v.shape)}"
        assert k.dtype == v.dtype, f"k and v must be of one dtype, got {k.dtype} and {v.dtype}"
        k, v = _dense(k), _dense(v)
        self._kernels.write(
            self._view(layer), self._batch, layer, native.native_dtype(k.dtype), k.data_ptr(), k.stride(0),
            k.stride(1), v.data_ptr(), v.stride(0), v.stride(1), torch.get_num_threads(),
        )  # fmt: skip

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        cache, spans = self.cache, self.spans
        pool, heads = cache.pool.of_layer(layer), cache.pool.layout.heads[layer]
        shape = len(spans.position), pool.kind.key_size
        assert q.shape[::2] == shape and q.shape[1] % heads == 0, (
            f"q must be [{shape[0]}, n x {heads}, {shape[1]}], got {tuple(q.shape)}"
        )
        queries = _dense(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        native_spec = NativeSpec(spec)
        if pool.tier is not None:
            read = self._kernels.attend_selected(
                self._work, self._view(layer), self._batch, layer=layer, dtype=native.native_dtype(q.dtype),
                q=queries.data_ptr(), q_token=queries.stride(0), q_head=queries.stride(1),
                out=out.data_ptr(), num_query_heads=q.shape[1], spec=native_spec.native,
                selection=_native_selection(pool.tier.tier, spans), threads=torch.get_num_threads(),
            )  # fmt: skip
            count_reads(read, pool.tier)
            return out
        self._kernels.attend(
            self._work, self._view(layer), self._batch, layer, native.native_dtype(q.dtype),
            queries.data_ptr(), queries.stride(0), queries.stride(1), out.data_ptr(), q.shape[1],
            native_spec.native, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        judged, q = queries.judged, _dense(queries.q)
        native_spec = NativeSpec(spec)
        self._kernels.replay(
            self._work, self._view(layer), layer=layer, slot=slot, head=judged.head, start=judged.start,
            end=judged.end, context_len=judged.context_len, dtype=native.native_dtype(q.dtype),
            q=q.data_ptr(), q_token=q.stride(0), q_head=q.stride(1), count=len(q), first=queries.first,
            every=queries.every, num_query_heads=q.shape[1], spec=native_spec.native,
            threads=torch.get_num_threads(),
        )  # fmt: skip

    @cached_property
    def _batch(self) -> native.Batch:
        return native_batch(self.spans)

    def _view(self, layer: int) -> native.Cache:
        pool = self.cache.pool
        return self._view_of(pool.of_layer(layer), pool.layout.heads[layer])

    def _view_of(self, pool: KindPool, heads: int) -> native.Cache:
        found = self._views.get((pool.first, heads))
        if found is None:
            found = self._views[pool.first, heads] = native_cache(self.cache, pool, heads)
        return found


def _native_selection(tier: ValueTier, spans: Spans) -> native.Selection:
    return native.Selection(
        most=tier.top_n, renormalize=tier.renormalize, select_from=spans.select_from.tolist()
    )


def _dense(x: Tensor) -> Tensor:
    """Return x, [T, heads, d], with the elements of a head side by side."""
    return x if x.stride(2) == 1 else x.contiguous()
