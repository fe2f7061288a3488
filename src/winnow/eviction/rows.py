"""What a score may look at: the rows of one layer, for all sequences of a round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.attention import PagedCache
from winnow.cache.layout import ceil_div


@dataclass(frozen=True)
class Round:
    """The sequences that one policy shrinks together. B of them.

    Attributes:
        slots: their cache slots.
        now: position of the last token computed, int64 [B].
        budget: KVs per row on average after the round, int64 [B].
        sinks: how many of the first positions are protected.
        recent: how many of the last positions are protected, int64 [B].
        spans: further protected positions of each sequence, as half-open intervals.
        tokens: tokens computed so far, int64 [B].
        similarity: float32 [B, L], cosine of the hidden state before and after attention; empty where nobody asked.
    """

    slots: tuple[int, ...]
    now: Tensor
    budget: Tensor
    sinks: int
    recent: Tensor
    spans: tuple[tuple[tuple[int, int], ...], ...]
    tokens: Tensor
    similarity: Tensor


class LayerRows:
    """The KVs of one layer, padded to N slots a row.

    Attributes:
        layer: which.
        slot: int64 [B, H, N], where each KV lies in the pool.
        length: int32 [B, H]; valid: bool [B, H, N], below the length.
        position: int32 [B, H, N], arbitrary where not valid.
        protected: bool [B, H, N], those that must stay.
        score: float32 [num_scores, B, H, N], what attention told (`Observe`).
        kind: uint8 [B, H, N], of the KV's token: see `winnow.models.tokens`; zeros where nobody asked.
    """

    def __init__(
        self, cache: PagedCache, round_: Round, layer: int, num_slots: int, kinds: Tensor | None
    ) -> None:
        pool, manager = cache.pool, cache.manager
        block_size = pool.layout.block_size
        device = pool.k.device
        self.round = round_
        self.layer = layer
        slots = torch.tensor(round_.slots, device=device)
        blocks = manager.tables.lookup(slots, layer, ceil_div(num_slots, block_size)).long()
        offset = torch.arange(block_size, device=device)
        self.slot = (blocks[..., None] * block_size + offset).flatten(2)[..., :num_slots]
        self.length = manager.lengths[slots, layer]
        self.valid = torch.arange(num_slots, device=device) < self.length[..., None]
        self.position = pool.position.flatten()[self.slot]
        self.protected = self.valid & self._kept_positions()
        self.score = pool.score.flatten(1)[:, self.slot]
        self._pool = pool
        self._kinds = kinds

    def _kept_positions(self) -> Tensor:
        position, round_ = self.position, self.round
        kept = (position < round_.sinks) | (self.age() < round_.recent[:, None, None])
        for index, spans in enumerate(round_.spans):
            for start, end in spans:
                kept[index] |= (position[index] >= start) & (position[index] < end)
        return kept

    @property
    def kind(self) -> Tensor:
        if self._kinds is None:
            return torch.zeros_like(self.position, dtype=torch.uint8)
        place = self.position.long().masked_fill(~self.valid, 0)
        return self._kinds[torch.arange(len(place), device=place.device)[:, None, None], place]

    def keys(self) -> Tensor:
        """The keys, rotated at their positions, float32 [B, H, N, d]; zeros where not valid."""
        return self._pool.k.flatten(0, 1)[self.slot].float().masked_fill_(~self.valid[..., None], 0.0)

    def values(self) -> Tensor:
        """The values, float32 [B, H, N, d]; zeros where not valid."""
        return self._pool.v.flatten(0, 1)[self.slot].float().masked_fill_(~self.valid[..., None], 0.0)

    def age(self) -> Tensor:
        """Positions from each KV to the last token computed, int64 [B, H, N]; its own query's is 0."""
        return self.round.now[:, None, None] - self.position
