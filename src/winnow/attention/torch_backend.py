"""Operations that a backend without kernels for them computes in tensor operations, on any device."""

import torch
from torch import Tensor

from winnow.attention.interface import AttentionBackend, AttentionSpec, BackendStep, ReplayQueries
from winnow.attention.ranked_rows import RankedRows, moves
from winnow.attention.replay import replay_rows
from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache
from winnow.cache.layout import ceil_div


class TorchBackend(AttentionBackend):
    """See `AttentionBackend`. Base class of the backends whose `keep_best` is plain torch."""

    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        # The device is waited for once: for who moves.
        evicted = rows.lowest(rows.length - kept, most_evicted)
        self.compact(pool, *moves(rows.valid & ~evicted, kept, rows.block))


class TorchStep(BackendStep):
    """See `BackendStep`. Base class of the steps whose `replay` is plain torch."""

    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        replay_rows(self.cache, layer, slot, queries, spec)


def write_rows(cache: PagedCache, spans: Spans, layer: int, k: Tensor, v: Tensor) -> Tensor:
    """Store KVs as `BackendStep.write` does. Returns the blocks of the rows, int64 [B, H, blocks of the longest]."""
    pool = cache.pool.of_layer(layer)
    blocks, block, offset = _places(cache, spans, layer)
    position = spans.position[:, None].expand_as(block)
    pool.write(block * pool.kind.size + offset, k, v, position)
    return blocks


def _places(cache: PagedCache, spans: Spans, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the rows' blocks, int64 [B, H, blocks of the longest], and where the batch's KVs lie: block and offset,
    int64 [T, H] each."""
    tables, size, heads = cache.tables, cache.pool.layout.block_size, cache.pool.layout.heads[layer]
    # Count a token's slot from the end of its row: rows may differ in length, but all end with this batch.
    index = (
        tables.lengths[spans.token_slots, layer, :heads].long() - 1 - spans.tokens_after[:, None]
    )  # [T, H]
    most = ceil_div(int(spans.lengths.max()), size)
    blocks = tables.lookup(spans.device_slots, layer, most)[:, :heads].long()
    head = torch.arange(index.shape[1], device=spans.device)
    return blocks, blocks[spans.token_sequence[:, None], head, index // size], index % size
