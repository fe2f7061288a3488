"""Operations that a backend without kernels for them computes in tensor operations, on any device."""

from torch import Tensor

from winnow.attention.interface import AttentionBackend, AttentionSpec, JudgedKVs
from winnow.attention.ranked_rows import RankedRows, moves
from winnow.attention.replay import replay_rows
from winnow.cache import KVPool, PagedCache


class TorchBackend(AttentionBackend):
    """See `AttentionBackend`. Base class of the backends whose `keep_best` and `replay` are plain torch."""

    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        # The device is waited for once: for who moves.
        evicted = rows.lowest(rows.length - kept, most_evicted)
        self.compact(pool, *moves(rows.valid & ~evicted, kept, rows.block))

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
        replay_rows(
            cache,
            layer,
            slot,
            q,
            spec,
            judged=judged,
            first=first,
            every=every,
            query_logs=query_logs,
            key_logs=key_logs,
        )
