"""Attention over a paged cache in plain torch: the oracle of the other backends.

Rows are decoded into padded float32 tensors, computed by the textbook formula, and masked.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from winnow.attention.gathered_rows import (
    GatheredRows,
    Weights,
    attend_group,
    attend_split,
    sequence_groups,
    softmax_over,
    weighted_sum,
)
from winnow.attention.interface import (
    AttentionBackend,
    AttentionSpec,
    BackendStep,
    HeadRotation,
    ReplayQueries,
)
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
    tables, size, heads = cache.tables, cache.pool.layout.block_size, cache.pool.layout.heads[layer]
    # Count a token's slot from the end of its row: rows may differ in length, but all end with this batch.
    index = (
        tables.lengths[spans.token_slots, layer, :heads].long() - 1 - spans.tokens_after[:, None]
    )  # [T, H]
    most = ceil_div(int(spans.lengths.max()), size)
    blocks = tables.lookup(spans.device_slots, layer, most)[:, :heads].long()
    block = blocks[spans.token_sequence[:, None], torch.arange(heads, device=spans.device), index // size]
    position = spans.position[:, None].expand_as(block)
    cache.pool.of_layer(layer).write(block * size + index % size, k, v, position)
    return blocks


class ReferenceBackend(TorchBackend):
    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        return ReferenceStep(cache, spans)

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        pool.move(source, target)


class ReferenceStep(TorchStep):
    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        spans = self.spans
        write_rows(self.cache, spans, layer, k, v)
        if (window := self.cache.window(layer)) is not None:
            stays = torch.from_numpy(~spans.temporary).to(k.device)[spans.token_sequence]
            parts = (spans.token_slots, k, v, spans.position, spans.tokens_after)
            window.write(layer, *(part[stays] for part in parts))

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        cache, spans = self.cache, self.spans
        pool = cache.pool.of_layer(layer)
        if pool.tier is not None:
            return attend_split(cache, spans, layer, q, spec, partial(self.last_visible, spec))
        out = q.new_empty((*q.shape[:2], pool.kind.value_size))
        window = cache.window(layer)
        for group in sequence_groups(spans, cache.pool.layout.heads[layer] * pool.kind.key_size):
            rows = GatheredRows.gather(cache, spans, group, layer)
            v = rows.values()
            if window is not None:
                window.widen(rows.device_slots, layer, rows.position, rows.k, v)
                v.masked_fill_(~rows.valid[..., None], 0.0)

            def attend(
                q: Tensor, position: Tensor, first: int, rows: GatheredRows = rows, v: Tensor = v
            ) -> tuple[Tensor, Weights]:
                last = self.last_visible(spec, first, position.shape[1])
                weights = softmax_over(q, position, rows, spec, last)
                return weighted_sum(weights.p, v), weights

            attend_group(spans, group, rows, q, attend, out)
        return out

    def last_visible(self, spec: AttentionSpec, first: int, count: int) -> Tensor | None:
        """Return positions of the last KVs that queries from `first` on see, int32 [G, count]; None: their own."""
        return None


class TwoWayStep(ReferenceStep):
    """Step of one sequence, some of whose tokens see later ones of the same step: those of a picture see each other.

    Args:
        last: position of the last KV that each token sees, int32 [T].
        windowed: only in layers with a window; the others are causal.
    """

    def __init__(self, cache: PagedCache, spans: Spans, last: Tensor, *, windowed: bool) -> None:
        super().__init__(cache, spans)
        self._last, self._windowed = last, windowed

    def last_visible(self, spec: AttentionSpec, first: int, count: int) -> Tensor | None:
        if self._windowed and spec.window is None:
            return None
        return self._last[None, first : first + count]


class PartedStep(BackendStep):
    """Step of a batch that is written as a whole and attends in parts, which together hold each token once.

    A part is the indices of its tokens in the batch, int64 [n], and what computes their attention.
    """

    def __init__(self, whole: BackendStep, parts: Sequence[tuple[Tensor, BackendStep]]) -> None:
        super().__init__(whole.cache, whole.spans)
        self._whole, self.parts = whole, tuple(parts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._whole.write(layer, k, v)

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        return self._whole.rotate_and_write(layer, heads, query_heads, rotation)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        out = q.new_empty((*q.shape[:2], self.cache.pool.of_layer(layer).kind.value_size))
        for tokens, step in self.parts:
            out[tokens] = step.attend(layer, q[tokens], spec)
        return out

    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        self._whole.replay(layer, slot, queries, spec)
