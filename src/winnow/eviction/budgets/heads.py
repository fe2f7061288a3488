"""How a layer's budget is split over its heads."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError
from winnow.eviction.budgets.base import Budget
from winnow.eviction.budgets.layers import EqualLayers, LayerSplit
from winnow.eviction.ranking import Ranking, ranks
from winnow.eviction.rows import LayerRows


@dataclass(frozen=True)
class EqualHeads(Budget):
    """Every head of a layer keeps the same number."""

    layers: LayerSplit = field(default_factory=EqualLayers)

    @property
    def equal_rows(self) -> bool:
        return isinstance(self.layers, EqualLayers) and not self.wide_layers

    @property
    def needs_similarity(self) -> bool:
        return self.layers.needs_similarity

    def targets(self, ranking: Ranking) -> Tensor:
        shares = self.raised(ranking, self.layers.budgets(ranking))
        return shares[:, :, None].expand_as(ranking.length)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        if self.equal_rows:
            return layout.blocks_for(budget)
        return super().blocks_after(layout, budget, protected)


@dataclass(frozen=True)
class Fixed(EqualHeads):
    """So many KVs in every row, whatever the prompt (Batch-Max Algorithm 2 keeps one)."""

    kvs: int = 1

    @property
    def fixed(self) -> int:
        return self.kvs


@dataclass(frozen=True)
class AdaptiveHeads(Budget):
    """The heads of a layer compete (Ada-KV).

    Of the layer's budget above what is protected, a share `floor` is dealt equally; the rest goes by how many of the
    layer's best KVs each head has.
    """

    floor: float = 0.2
    layers: LayerSplit = field(default_factory=EqualLayers)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor must be between 0 and 1, got {self.floor}")

    @property
    def needs_similarity(self) -> bool:
        return self.layers.needs_similarity

    def targets(self, ranking: Ranking) -> Tensor:
        shares = self.raised(ranking, self.layers.budgets(ranking))
        base = (shares[:, :, None] - ranking.protected).clamp_min(0)  # [B, L, H]
        free = ranking.length - ranking.protected
        gone = (free - base).sum(dim=2).clamp_min(0)  # what the layer must lose, [B, L]
        worth = ranking.worth
        if self.has_floors:
            worth = without_best(worth, ranking.length, self.row_least(ranking))
        best = free - _lowest(worth, gone)
        # In float64, so that floors such as 0.7 round as in the formula.
        floor = (base.double() * self.floor).floor()
        return (best.float() * (1 - self.floor) + floor).round().long() + ranking.protected


@dataclass(frozen=True)
class AdaptiveRows(Budget):
    """All heads of all layers compete, block by block (KV-Compress 4.2.2).

    What a sequence must give up is counted in blocks, and those go whose costliest KV is cheapest.
    """

    def targets(self, ranking: Ranking) -> Tensor:
        kept = -(-ranking.round.budget * (ranking.num_layers * ranking.num_heads) // ranking.block_size)
        excess = (ranking.blocks.sum(dim=(1, 2)) - kept).clamp_min(0)
        worth, most = ranking.worth, None
        if self.has_floors:
            worth = without_best(worth, ranking.length, self.row_least(ranking))
            most = ranking.blocks.sum(dim=2) - self.layer_least_blocks(ranking)
        freed = cheapest_blocks(worth, ranking.length, excess, ranking.block_size, most)
        return length_without(ranking.length, freed, ranking.block_size)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        even = ceil_div(budget * layout.rows_per_seq, layout.block_size)
        if self.has_floors:
            return even + layout.rows_per_seq  # floors end in the middle of blocks
        return max(even, layout.blocks_for(protected))


@dataclass(frozen=True)
class LazyLayers(Budget):
    """Layers that attend to little but sinks and recent KVs keep the budget, the others everything (SimLayerKV).

    A layer is lazy if, averaged over its heads, the last query pays more than `threshold` of its attention to the
    protected KVs. Goes with the score `LastQuery`.
    """

    bounded: ClassVar[bool] = False
    threshold: float = 0.9

    def layer_stats(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0].masked_fill(~rows.protected, 0.0).sum(dim=-1)

    def targets(self, ranking: Ranking) -> Tensor:
        lazy = ranking.stats.mean(dim=2, keepdim=True) > self.threshold
        kept = torch.where(lazy, ranking.round.budget[:, None, None], ranking.length)
        return torch.maximum(kept, self.row_least(ranking))


def _lowest(worth: Tensor, count: Tensor) -> Tensor:
    """How many of the `count` lowest KVs of a layer each head has.

    worth [B, L, H, N] with +inf for what cannot go, count [B, L]. Among equals the first head loses first. [B, L, H].
    """
    heads, slots = worth.shape[2:]
    order = worth.flatten(2).sort(dim=-1, stable=True).indices
    taken = torch.arange(heads * slots, device=worth.device) < count[..., None]
    lost = torch.zeros_like(taken).scatter_(-1, order, taken)
    return lost.unflatten(2, (heads, slots)).sum(dim=-1)


def without_best(worth: Tensor, length: Tensor, least: Tensor) -> Tensor:
    """`worth`, sorted as in `cheapest_blocks`, where the `least` best KVs of each row cannot go either.

    length and least: int64 [B, L, H].
    """
    place = torch.arange(worth.shape[-1], device=worth.device)
    return worth.masked_fill(place >= (length - least)[..., None], torch.inf)


def cheapest_blocks(
    worth: Tensor, length: Tensor, excess: Tensor, block_size: int, most: Tensor | None = None
) -> Tensor:
    """Which blocks a sequence gives up: the `excess` cheapest ones, or all that hold nothing protected.

    A row of n KVs frees its first block when its n mod b (b if that is 0) lowest KVs go, each further one when b more
    go; the cost of a block is the highest worth among the KVs that go for it. (KV-Compress eq. 16-18. The paper gets
    the same by giving empty slots the metric 0.) Costs rise along a row, so the cheapest blocks of all rows are
    always the first ones of each. Of equal costs the lower layer and head give way.

    Args:
        worth: float32 [B, L, H, N], ascending, +inf for what cannot go and past the length.
        length: int64 [B, L, H].
        excess: int64 [B], blocks to free.
        most: int64 [B, L], blocks that a layer may give up; None: all. Limits of rows lie in `worth`. As each limit
            holds for a row, a layer or all, taking the cheapest within each in turn is cheapest for all of them.

    Returns:
        Blocks to free in each row, int64 [B, L, H].
    """
    blocks = ceil_div(worth.shape[-1], block_size)
    first = (length - 1) % block_size  # index of the last KV that goes for a row's first block
    last = first[..., None] + torch.arange(blocks, device=worth.device) * block_size  # [B, L, H, blocks]
    inside = last < length[..., None]
    cost = worth.gather(-1, last.clamp_max(worth.shape[-1] - 1)).masked_fill(~inside, torch.inf)
    if most is not None:
        cost = cost.masked_fill(ranks(cost.flatten(2)).view_as(cost) >= most[..., None, None], torch.inf)
    cost = cost.flatten(1)
    cost, order = cost.sort(dim=-1, stable=True)
    taken = (torch.arange(cost.shape[1], device=cost.device) < excess[:, None]) & (cost < torch.inf)
    freed = torch.zeros_like(taken).scatter_(-1, order, taken)
    return freed.unflatten(1, last.shape[1:]).sum(dim=-1)


def length_without(length: Tensor, freed: Tensor, block_size: int) -> Tensor:
    """KVs that rows of `length` KVs keep when `freed` of their blocks go."""
    kept = (-(-length // block_size) - freed) * block_size
    return torch.minimum(length, kept)
