"""Attention over a paged cache on the CPU: the C++ kernels of `native/`, called with addresses of tensors."""

import torch
from torch import Tensor

from winnow import native
from winnow.attention.interface import AttentionBackend, AttentionSpec, JudgedKVs
from winnow.attention.native_step import NativeSpec, NativeStep, count_reads
from winnow.attention.observer import AttentionObserver
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import Spans
from winnow.attention.split import attend_split
from winnow.attention.torch_backend import summarise_keys
from winnow.cache import KVPool, PagedCache
from winnow.cache.codec import KVCodec, PairCodec, PlainCodec, rotation_block
from winnow.cache.formats import VectorFormat
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout
from winnow.errors import ConfigError


class NativeBackend(AttentionBackend):
    """See `AttentionBackend` for shapes and meaning. Results do not depend on the number of threads.

    All layers of a step bring the same cache and the same spans, so what the kernels need of them is made once and kept
    until others come.
    """

    def __init__(self, kernels: native.Kernels) -> None:
        self._kernels = kernels
        self._work = native.Workspace()
        self._pools: dict[int, tuple[KVPool, native.Pool]] = {}
        self._caches: dict[int, tuple[PagedCache, KVPool, native.Cache]] = {}
        self._batch: tuple[Spans, native.Batch] | None = None

    def write(self, cache: PagedCache, spans: Spans, layer: int, k: Tensor, v: Tensor) -> None:
        layout = cache.pool.layout
        shape = (len(spans.position), layout.num_kv_heads, layout.head_dim)
        assert k.shape == v.shape == shape, f"k and v must be {shape}, got {tuple(k.shape)}, {tuple(v.shape)}"
        assert k.dtype == v.dtype, f"k and v must be of one dtype, got {k.dtype} and {v.dtype}"
        k, v = _dense(k), _dense(v)
        self._kernels.write(
            self._native_cache(cache, layer),
            self._native_batch(spans),
            layer,
            native.native_dtype(k.dtype),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            torch.get_num_threads(),
        )
        summarise_keys(cache, spans, layer, k)

    def attend(self, cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        layout = cache.pool.layout
        assert (
            q.shape[::2] == (len(spans.position), layout.head_dim) and q.shape[1] % layout.num_kv_heads == 0
        ), (
            f"q must be [{len(spans.position)}, n x {layout.num_kv_heads}, {layout.head_dim}], got {tuple(q.shape)}"
        )
        queries = _dense(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        native_spec = NativeSpec(spec)
        if layout.is_far(layer):
            if _selects_pages(layout):
                return attend_split(cache, spans, layer, q, spec)
            read = self._kernels.attend_selected(
                self._work,
                self._native_cache(cache, layer),
                self._native_batch(spans),
                layer=layer,
                dtype=native.native_dtype(q.dtype),
                q=queries.data_ptr(),
                q_token=queries.stride(0),
                q_head=queries.stride(1),
                out=out.data_ptr(),
                num_query_heads=q.shape[1],
                spec=native_spec.native,
                selection=_native_selection(layout, spans),
                threads=torch.get_num_threads(),
            )
            assert cache.pool.values_apart is not None, "values lie on a tier"
            count_reads(read, cache.pool.values_apart)
            return out
        self._kernels.attend(
            self._work,
            self._native_cache(cache, layer),
            self._native_batch(spans),
            layer,
            native.native_dtype(q.dtype),
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            out.data_ptr(),
            q.shape[1],
            native_spec.native,
            torch.get_num_threads(),
        )
        return out

    def replay(
        self,
        cache: PagedCache,
        layer: int,
        slot: int,
        q: Tensor,
        spec: AttentionSpec,
        *,
        judged: JudgedKVs,
        first: int,
        every: int = 1,
        query_logs: Tensor | None = None,
        key_logs: Tensor | None = None,
    ) -> None:
        queries = _dense(q)
        # The kernel gets addresses, so these must live as long.
        taken_off, added = (None if x is None else x.float().contiguous() for x in (query_logs, key_logs))
        native_spec = NativeSpec(spec)
        self._kernels.replay(
            self._work,
            self._native_cache(cache, layer),
            layer=layer,
            slot=slot,
            head=judged.head,
            start=judged.start,
            end=judged.end,
            context_len=judged.context_len,
            dtype=native.native_dtype(q.dtype),
            q=queries.data_ptr(),
            q_token=queries.stride(0),
            q_head=queries.stride(1),
            count=len(queries),
            first=first,
            every=every,
            num_query_heads=queries.shape[1],
            query_logs=0 if taken_off is None else taken_off.data_ptr(),
            key_logs=0 if added is None else added.data_ptr(),
            spec=native_spec.native,
            threads=torch.get_num_threads(),
        )

    def step(self, cache: PagedCache, spans: Spans) -> NativeStep | None:
        """The step for layers that attend within their own native call."""
        layout, tier = cache.pool.layout, cache.pool.layout.value_tier
        if _selects_pages(layout):
            return None
        batch = self._native_batch(spans)
        if tier is None:
            return NativeStep(self._native_cache(cache, 0), batch, self._work)
        near, far = cache.pool.views
        return NativeStep(
            self._native_view(cache, near),
            batch,
            self._work,
            native.FarLayers(cache=self._native_view(cache, far), first=tier.layers),
            _native_selection(layout, spans),
            cache.pool.values_apart,
        )

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        if len(pool.views) > 1:
            block = source // pool.layout.block_size
            for view in pool.views:
                mask = view.covers(block)
                self.compact(view, source[mask], target[mask])
            return
        source, target = source.contiguous(), target.contiguous()
        self._kernels.compact(
            self._native_pool(pool),
            source.data_ptr(),
            target.data_ptr(),
            len(source),
            torch.get_num_threads(),
        )

    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        if len(pool.views) > 1:
            for view in pool.views:
                # A row of no KVs is of either kind, as nothing of it moves.
                mask = view.covers(rows.block[..., 0])
                self.keep_best(view, rows.where(mask), kept[mask], most_evicted)
            return
        score, must_stay = rows.score.contiguous(), rows.must_stay.contiguous()
        block, length, kept = rows.block.contiguous(), rows.length.contiguous(), kept.int().contiguous()
        assert score.shape[-1] == block.shape[-1] * pool.layout.block_size, "rows are padded to whole blocks"
        self._kernels.keep_best(
            self._native_pool(pool),
            block.data_ptr(),
            length.data_ptr(),
            kept.data_ptr(),
            score.data_ptr(),
            must_stay.data_ptr(),
            length.numel(),
            score.shape[-1],
            torch.get_num_threads(),
        )

    def _native_pool(self, pool: KVPool) -> native.Pool:
        known = self._pools.get(pool.first)
        if known is None or known[0] is not pool:
            known = self._pools[pool.first] = pool, native_pool(pool)
        return known[1]

    def _native_cache(self, cache: PagedCache, layer: int) -> native.Cache:
        """The cache as the rows of a layer see it."""
        return self._native_view(cache, cache.pool.of_layer(layer))

    def _native_view(self, cache: PagedCache, pool: KVPool) -> native.Cache:
        """The cache with one of the pool's views."""
        known = self._caches.get(pool.first)
        if known is None or known[0] is not cache or known[1] is not pool:
            layout, tables = cache.pool.layout, cache.tables
            _check_reads(cache.pool.layout.codec)
            view = native.Cache(
                self._native_pool(pool),
                pages=tables.pages.data_ptr(),
                page_table=tables.page_table.data_ptr(),
                lengths=cache.tables.lengths.data_ptr(),
                num_layers=layout.num_layers,
                num_heads=layout.num_kv_heads,
                page_entries=PAGE_ENTRIES,
                pages_per_seq=tables.page_table.shape[1],
            )
            known = self._caches[pool.first] = cache, pool, view
        return known[2]

    def _native_batch(self, spans: Spans) -> native.Batch:
        if self._batch is None or self._batch[0] is not spans:
            # By identity: sequences of a policy share theirs, and to hash each one's costs more than equals would.
            kinds = {id(kind): kind for kind in spans.observe if kind is not None}
            number = {kind: i for i, kind in enumerate(kinds)}
            view = native.Batch(
                slots=spans.slots.tolist(),
                counts=spans.counts.tolist(),
                starts=spans.starts.tolist(),
                position=spans.position.data_ptr(),
                num_tokens=len(spans.position),
                observer=[-1 if kind is None else number[id(kind)] for kind in spans.observe],
                observe_from=spans.observe_from.tolist(),
                observers=[self._native_observer(kind) for kind in kinds.values()],
            )
            self._batch = spans, view
        return self._batch[1]

    def _native_observer(self, observer: AttentionObserver) -> native.AttentionObserver:
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


def reads(codec: KVCodec) -> bool:
    """Whether the kernels read KVs that the codec stores."""
    return isinstance(codec, PairCodec) and all(
        form.name in native.FORMATS or form.name == "int4-outlier" for form in (codec.key, codec.value)
    )


def _selects_pages(layout: CacheLayout) -> bool:
    """Whether values are chosen by summaries of keys, which is computed in plain torch."""
    return layout.value_tier is not None and layout.value_tier.select != "weights"


def _native_selection(layout: CacheLayout, spans: Spans) -> native.Selection:
    """Which queries select values, and how many, where these lie on a tier."""
    tier = layout.value_tier
    assert tier is not None, "values lie on a tier"
    return native.Selection(
        most=tier.top_n, renormalize=tier.renormalize, select_from=spans.select_from.tolist()
    )


def native_pool(pool: KVPool) -> native.Pool:
    """The pool as the kernels see it; it points at its tensors.

    Where the kernels do not read its codec they still move its KVs, which takes the fields alone.
    """
    assert len(pool.views) == 1, "where values lie apart, kernels see the pool as a layer does"
    layout = pool.layout
    codec = layout.codec
    plain = isinstance(codec, PlainCodec)
    keys = values = None
    if isinstance(codec, PairCodec) and not plain:
        keys = _coded_vectors(pool, "k", codec.key, codec.rotate_keys)
        values = _coded_vectors(pool, "v", codec.value, codec.rotate_values)
    return native.Pool(
        fields=[_native_field(x, pool.first) for x in pool.fields.values()],
        k=_address(pool.k, pool.first) if plain else 0,
        v=_address(pool.v, pool.first) if plain else 0,
        position=pool.position.data_ptr(),
        accumulators=pool.accumulators.data_ptr(),
        num_slots=pool.num_blocks * layout.block_size,
        num_accumulators=layout.num_accumulators,
        block_size=layout.block_size,
        block_stride=pool.k.stride(0) if plain else 0,
        head_dim=layout.head_dim,
        dtype=native.native_dtype(pool.k.dtype) if plain else native.DType.f32,
        keys=keys,
        values=values,
    )


def key_rows(pool: KVPool, slot: Tensor, length: Tensor) -> native.KeyRows:
    """The keys of rows for the kernels, where they lie in the pool. It points at all three arguments.

    Args:
        slot: int64 [..., N], dense, the slots of each row; length: int32 [...], dense, how many of them count.
    """
    _check_reads(pool.layout.codec)
    return native.KeyRows(
        pool=native_pool(pool),
        slot=slot.data_ptr(),
        length=length.data_ptr(),
        rows=length.numel(),
        stride=slot.shape[-1],
    )


def _check_reads(codec: KVCodec) -> None:
    """Refuse what the kernels do not read.

    Raises:
        ConfigError: names the codec.
    """
    if not reads(codec):
        raise ConfigError(
            f"attention_backend native reads KVs stored as one of {', '.join(native.FORMATS)}, got {codec.name}"
        )


def _native_field(field: Tensor, first: int) -> native.Field:
    """A field of the blocks from `first` on, [num_blocks, block_size, length], as bytes."""
    size = field.itemsize
    return native.Field(_address(field, first), field.stride(1) * size, field.stride(0) * size)


def _address(field: Tensor, first: int) -> int:
    """Where block 0 would lie, from which the kernels count, of a field of the blocks from `first` on."""
    return field.data_ptr() - first * field.stride(0) * field.itemsize


def _coded_vectors(pool: KVPool, side: str, form: VectorFormat, rotated: bool) -> native.CodedVectors:
    """How the kernels read one side of the KVs; `side` is "k" or "v"."""
    nowhere = native.Field(0, 0, 0)
    found = {suffix: _native_field(pool.fields[f"{side}{suffix}"], pool.first) for suffix in form.suffixes}
    head_dim = pool.layout.head_dim
    scale, outlier = pool.fields.get(f"{side}_scale"), pool.fields.get(f"{side}_outlier")
    return native.CodedVectors(
        format=native.FORMATS[form.name.removesuffix("-outlier")],
        code=found[""],
        group=head_dim if scale is None else head_dim // scale.shape[-1],
        scale=found.get("_scale", nowhere),
        min=found.get("_min", nowhere),
        num_outliers=0 if outlier is None else outlier.shape[-1],
        outlier=found.get("_outlier", nowhere),
        channel=found.get("_channel", nowhere),
        rotation=rotation_block(head_dim) if rotated else 1,
    )


def _dense(x: Tensor) -> Tensor:
    """x, [T, heads, d], with the elements of a head side by side."""
    return x if x.stride(2) == 1 else x.contiguous()
