"""Attention over a paged cache on the CPU: the C++ kernels of `native/`, called with addresses of tensors."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from winnow.attention.interface import AttentionSpec
from winnow.attention.native_step import NativeSpec, NativeStep
from winnow.attention.observe import Observe
from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache
from winnow.cache.layout import PAGE_ENTRIES

if TYPE_CHECKING:
    from winnow import _native


class NativeBackend:
    """See `AttentionBackend` for shapes and meaning. Results do not depend on the number of threads.

    All layers of a step bring the same cache and the same spans, so what the kernels need of them is made once and kept
    until others come.
    """

    def __init__(self, kernels: "_native.Kernels") -> None:
        from winnow import _native

        self._native = _native
        self._kernels = kernels
        self._work = _native.Workspace()
        self._pool: tuple[KVPool, _native.Pool] | None = None
        self._cache: tuple[PagedCache, _native.Cache] | None = None
        self._batch: tuple[Spans, _native.Batch] | None = None

    def write(self, cache: PagedCache, spans: Spans, layer: int, k: Tensor, v: Tensor) -> None:
        layout = cache.pool.layout
        shape = (len(spans.position), layout.num_kv_heads, layout.head_dim)
        assert k.shape == v.shape == shape, f"k and v must be {shape}, got {tuple(k.shape)}, {tuple(v.shape)}"
        k, v = _dense(k, layout.dtype), _dense(v, layout.dtype)
        self._kernels.write(
            self._native_cache(cache),
            self._native_batch(spans),
            layer,
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            torch.get_num_threads(),
        )

    def attend(self, cache: PagedCache, spans: Spans, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        layout = cache.pool.layout
        assert (
            q.shape[::2] == (len(spans.position), layout.head_dim) and q.shape[1] % layout.num_kv_heads == 0
        ), (
            f"q must be [{len(spans.position)}, n x {layout.num_kv_heads}, {layout.head_dim}], got {tuple(q.shape)}"
        )
        queries = _dense(q, layout.dtype)
        out = torch.empty(q.shape, dtype=layout.dtype)
        native_spec = NativeSpec(spec)
        self._kernels.attend(
            self._work,
            self._native_cache(cache),
            self._native_batch(spans),
            layer,
            queries.data_ptr(),
            queries.stride(0),
            queries.stride(1),
            out.data_ptr(),
            q.shape[1],
            native_spec.native,
            torch.get_num_threads(),
        )
        return out.to(q.dtype)

    def replay(
        self,
        cache: PagedCache,
        layer: int,
        slot: int,
        q: Tensor,
        spec: AttentionSpec,
        *,
        judged: tuple[int, int, int],
        context_len: int,
        first: int,
        every: int = 1,
        query_logs: Tensor | None = None,
        key_logs: Tensor | None = None,
    ) -> None:
        """Raise accumulator 0 of a context's KVs to the largest attention that a repetition's queries pay them.

        Args:
            slot: of the sequence; KVs of its rows lie in the order of their positions, none is missing.
            q: [n, Hq, d], queries at positions `first`, `first + every` and so on, behind the context.
            judged: how many of the context's first KVs, and first and end of a part of it, half-open. A query's softmax
                goes over these and the KVs behind the context up to its own position.
            query_logs: float32 [n], taken off the logarithm of what a query pays.
            key_logs: float32 [Hq, judged KVs], added to it.
        """
        head, start, end = judged
        queries = _dense(q, cache.pool.layout.dtype)
        # The kernel gets addresses, so these must live as long.
        taken_off, added = (None if x is None else x.float().contiguous() for x in (query_logs, key_logs))
        native_spec = NativeSpec(spec)
        self._kernels.replay(
            self._work,
            self._native_cache(cache),
            layer=layer,
            slot=slot,
            head=head,
            start=start,
            end=end,
            context_len=context_len,
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

    def step(self, cache: PagedCache, spans: Spans) -> NativeStep:
        """The step for layers that attend within their own native call."""
        batch = self._native_batch(spans)
        return NativeStep(self._native_cache(cache), batch, self._work, cache.pool.layout.dtype)

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        source, target = source.contiguous(), target.contiguous()
        self._kernels.compact(
            self._native_pool(pool),
            source.data_ptr(),
            target.data_ptr(),
            len(source),
            torch.get_num_threads(),
        )

    def keep_best(
        self, pool: KVPool, block: Tensor, length: Tensor, kept: Tensor, worth: Tensor, must_stay: Tensor
    ) -> None:
        """Move the KVs of rows that stay to the front: those that must, then those worth most, of equals the younger.

        Args:
            block: int64 [..., n], the blocks of each row.
            length: int32 [...], KVs of each row.
            kept: [...], how many stay, at least as many as must.
            worth: float32 [..., n * block size], arbitrary past the length.
            must_stay: bool [..., n * block size].
        """
        assert worth.shape[-1] == block.shape[-1] * pool.layout.block_size, "rows are padded to whole blocks"
        block, length, kept = block.contiguous(), length.contiguous(), kept.int().contiguous()
        worth, must_stay = worth.contiguous(), must_stay.contiguous()
        self._kernels.keep_best(
            self._native_pool(pool),
            block.data_ptr(),
            length.data_ptr(),
            kept.data_ptr(),
            worth.data_ptr(),
            must_stay.data_ptr(),
            length.numel(),
            worth.shape[-1],
            torch.get_num_threads(),
        )

    def _native_pool(self, pool: KVPool) -> "_native.Pool":
        if self._pool is None or self._pool[0] is not pool:
            layout = pool.layout
            formats = {
                torch.float32: self._native.DType.f32,
                torch.bfloat16: self._native.DType.bf16,
                torch.float16: self._native.DType.f16,
            }
            view = self._native.Pool(
                k=pool.k.data_ptr(),
                v=pool.v.data_ptr(),
                position=pool.position.data_ptr(),
                score=pool.score.data_ptr(),
                num_slots=pool.num_blocks * layout.block_size,
                num_scores=layout.num_scores,
                block_size=layout.block_size,
                block_stride=pool.k.stride(0),
                head_dim=layout.head_dim,
                dtype=formats[layout.dtype],
            )
            self._pool = pool, view
        return self._pool[1]

    def _native_cache(self, cache: PagedCache) -> "_native.Cache":
        if self._cache is None or self._cache[0] is not cache:
            layout, tables = cache.pool.layout, cache.tables
            view = self._native.Cache(
                self._native_pool(cache.pool),
                pages=tables.pages.data_ptr(),
                page_table=tables.page_table.data_ptr(),
                lengths=cache.tables.lengths.data_ptr(),
                num_layers=layout.num_layers,
                num_heads=layout.num_kv_heads,
                page_entries=PAGE_ENTRIES,
                pages_per_seq=tables.page_table.shape[1],
            )
            self._cache = cache, view
        return self._cache[1]

    def _native_batch(self, spans: Spans) -> "_native.Batch":
        if self._batch is None or self._batch[0] is not spans:
            # By identity: sequences of a policy share theirs, and to hash each one's costs more than equals would.
            kinds = {id(kind): kind for kind in spans.observe if kind is not None}
            number = {kind: i for i, kind in enumerate(kinds)}
            view = self._native.Batch(
                slots=spans.slots.tolist(),
                counts=spans.counts.tolist(),
                starts=spans.starts.tolist(),
                position=spans.position.data_ptr(),
                num_tokens=len(spans.position),
                observe=[-1 if kind is None else number[id(kind)] for kind in spans.observe],
                observe_from=spans.observe_from.tolist(),
                observes=[self._native_observe(kind) for kind in kinds.values()],
            )
            self._batch = spans, view
        return self._batch[1]

    def _native_observe(self, observe: Observe) -> "_native.Observe":
        pool = observe.pool
        return self._native.Observe(
            terms=[self._native.Term[term.name.lower()] for term in observe.terms],
            group=self._native.Group[observe.group.name.lower()],
            exclude_first=observe.exclude_first,
            replace=observe.replace,
            pool_size=pool.size if pool else 0,
            pool_max=pool is not None and pool.kind == "max",
            pool_per_query_head=pool is not None and pool.per_query_head,
            pool_skip_window=pool is not None and pool.skip_window,
        )


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, [T, heads, d], in the cache's dtype, with the elements of a head side by side."""
    x = x.to(dtype)
    return x if x.stride(2) == 1 else x.contiguous()
