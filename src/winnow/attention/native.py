"""Attention over a paged cache on the CPU: the C++ kernels of `native/`, called with addresses of tensors."""

from functools import cached_property

import torch
from torch import Tensor

from winnow import native
from winnow.attention.interface import AttentionBackend, AttentionSpec, BackendStep, ReplayQueries
from winnow.attention.native_step import NativeSpec, NativeStep, count_reads
from winnow.attention.native_views import native_batch, native_cache, native_pool
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache
from winnow.cache.kind_pool import KindPool
from winnow.values.value_tier import ValueTier


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
            if len(pool.kinds) == 1:
                self._keep_best(kind, rows, kept)
                continue
            # A row of no KVs is of any kind, as nothing of it moves.
            mask = kind.covers(rows.block[..., 0])
            self._keep_best(kind, rows.where(mask), kept[mask])

    def _keep_best(self, kind: KindPool, rows: RankedRows, kept: Tensor) -> None:
        score, must_stay = rows.score.contiguous(), rows.must_stay.contiguous()
        block, length, kept = rows.block.contiguous(), rows.length.contiguous(), kept.int().contiguous()
        self._kernels.keep_best(
            native_pool(kind), block.data_ptr(), length.data_ptr(), kept.data_ptr(), score.data_ptr(),
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
        return NativeStep(
            self._view_of(near, layout.num_kv_heads),
            self._batch,
            self._work,
            native.FarLayers(cache=self._view_of(far, layout.num_kv_heads), first=tier.layers),
            _native_selection(tier, self.spans),
            far.tier,
        )

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        cache = self.cache
        shape = (
            len(self.spans.position),
            cache.pool.layout.heads[layer],
            cache.pool.of_layer(layer).kind.key_size,
        )
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
    """Return which queries select values, and how many, where these lie on a tier."""
    return native.Selection(
        most=tier.top_n, renormalize=tier.renormalize, select_from=spans.select_from.tolist()
    )


def _dense(x: Tensor) -> Tensor:
    """Return x, [T, heads, d], with the elements of a head side by side."""
    return x if x.stride(2) == 1 else x.contiguous()
