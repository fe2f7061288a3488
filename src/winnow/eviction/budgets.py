"""Budgets by how they split over heads."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.cache.layout import ceil_div
from winnow.errors import ConfigError
from winnow.eviction.costs import Ranking, RowCosts, ranks


@dataclass(frozen=True)
class Budget(ABC):
    """Split of a sequence's budget, in KVs per row on average, over its rows; with floors of rows and layers.

    The even share is the number of KVs per row on average after a round. A floor is a share of it (a float between 0.0
    and 1.0) or a number of KVs (an int), which is capped at the even share.
    """

    row_floor: int | float = field(default=0, kw_only=True)
    """Minimum of every row; shorter rows keep all KVs."""
    layer_floor: int | float = field(default=0, kw_only=True)
    """Minimum of every layer, per row on average."""

    def __post_init__(self) -> None:
        for name in ("row_floor", "layer_floor"):
            value = getattr(self, name)
            if not (0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0):
                raise ConfigError(
                    f"{name} must be a count, or a share between 0.0 and 1.0 of the even share, got {value}"
                )

    @property
    def equal_rows(self) -> bool:
        return False

    @property
    def fixed(self) -> int | None:
        """Its own KVs per row, if it does not take the request's budget."""
        return None

    def costs(self, ranking: Ranking) -> RowCosts:
        """Return the costs of evicting from each row. Local to a rank: a row's costs depend on that row alone."""
        return RowCosts.of(ranking)

    @abstractmethod
    def allot(self, costs: RowCosts) -> Tensor:
        """Split the budget over the rows.

        Args:
            costs: of all heads, those of all ranks put together.

        Returns:
            KVs that each row keeps, int64 [B, L, H], the same on every rank. The planner never goes below what is
            protected.
        """

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        """Return an upper bound on blocks of a sequence after a round, with `protected` protected KVs in every row."""
        # Rows of uneven length waste less than one block each.
        return ceil_div(budget * layout.rows_per_seq, layout.block_size) + layout.rows_per_seq

    @property
    def has_floors(self) -> bool:
        return bool(self.row_floor or self.layer_floor)

    def row_least(self, costs: RowCosts) -> Tensor:
        return torch.minimum(self._amount(self.row_floor, costs.round.budget)[:, None, None], costs.length)

    def layer_least_blocks(self, costs: RowCosts) -> Tensor:
        kvs = self._amount(self.layer_floor, costs.round.budget) * costs.num_heads
        least = -(-kvs // costs.block_size)
        return torch.minimum(least[:, None], costs.blocks.sum(dim=2))

    def raised(self, costs: RowCosts, shares: Tensor) -> Tensor:
        """Raise shares of layers, KVs per row, int64 [B, L], to their floors.

        Other layers give up the difference in proportion to their excess over their own floors.
        """
        if not self.has_floors:
            return shares
        budget = costs.round.budget
        floor = torch.maximum(self._amount(self.row_floor, budget), self._amount(self.layer_floor, budget))
        least = torch.maximum(floor[:, None], costs.protected.amax(dim=2))
        above = (shares - least).clamp_min(0)
        room = (shares.sum(dim=1) - least.sum(dim=1)).clamp_min(0)
        return least + above * room[:, None] // above.sum(dim=1, keepdim=True).clamp_min(1)

    def _amount(self, floor: int | float, budget: Tensor) -> Tensor:
        if isinstance(floor, int):
            return budget.clamp_max(floor)
        exact = Fraction(str(floor))  # the decimal as written, rounded down
        return budget * exact.numerator // exact.denominator


@dataclass(frozen=True)
class LayerSplit(ABC):
    """Split of a budget over layers; the mean over layers is the budget, up to rounding."""

    @abstractmethod
    def budgets(self, costs: RowCosts) -> Tensor:
        """Return KVs per row of each layer, int64 [B, L]."""


@dataclass(frozen=True)
class EqualLayers(LayerSplit):
    """The same for all layers."""

    def budgets(self, costs: RowCosts) -> Tensor:
        return costs.round.budget[:, None].expand(-1, costs.num_layers)


@dataclass(frozen=True)
class Pyramid(LayerSplit):
    """Pyramid of budgets: from large shares for the first layers to small ones for the last, in equal steps.

    PyramidKV, without profiling. The share above the recent window, on average `base`, falls from 2 base - base // beta
    to base // beta. The first layer gets at most what exists, and prompts shorter than 2 base are split equally.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ConfigError(f"beta must be at least 1, got {self.beta}")

    def budgets(self, costs: RowCosts) -> Tensor:
        window, there = costs.round.recent, costs.round.tokens - costs.round.recent
        base = costs.round.budget - window
        least = base // self.beta
        most = 2 * base - least
        least = torch.where(most >= there, 2 * base - there, least)
        most = torch.minimum(most, there)
        step = (most - least) // max(costs.num_layers - 1, 1)
        layer = torch.arange(costs.num_layers, device=base.device)
        steps = most[:, None] - layer * step[:, None] + window[:, None]
        short = costs.round.tokens < 2 * base
        return torch.where(short[:, None], costs.round.budget[:, None], steps)


@dataclass(frozen=True)
class EqualHeads(Budget):
    """The same number in every head of a layer."""

    layers: LayerSplit = field(default_factory=EqualLayers)

    @property
    def equal_rows(self) -> bool:
        return isinstance(self.layers, EqualLayers)

    def allot(self, costs: RowCosts) -> Tensor:
        shares = self.raised(costs, self.layers.budgets(costs))
        return shares[:, :, None].expand_as(costs.length)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        if self.equal_rows:
            return layout.blocks_for(budget)
        return super().blocks_after(layout, budget, protected)


@dataclass(frozen=True)
class Fixed(EqualHeads):
    """A fixed number of KVs in every row, whatever the prompt (Batch-Max Algorithm 2 keeps one)."""

    kvs: int = 1

    @property
    def fixed(self) -> int:
        return self.kvs


@dataclass(frozen=True)
class AdaptiveHeads(Budget):
    """The heads of a layer compete (Ada-KV).

    A share `floor` of the layer's budget above the protected KVs is split equally; the rest in proportion to how many
    of the layer's best KVs each head has.
    """

    floor: float = 0.2
    layers: LayerSplit = field(default_factory=EqualLayers)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor must be between 0 and 1, got {self.floor}")

    def costs(self, ranking: Ranking) -> RowCosts:
        return RowCosts.of(ranking, ranking.sorted_score)

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        shares = self.raised(costs, self.layers.budgets(costs))
        base = (shares[:, :, None] - costs.protected).clamp_min(0)  # [B, L, H]
        free = costs.length - costs.protected
        gone = (free - base).sum(dim=2).clamp_min(0)  # KVs to evict from the layer, [B, L]
        cost = costs.cost
        if self.has_floors:
            cost = without_best(cost, costs.length, self.row_least(costs))
        best = free - _lowest(cost, gone)
        # In float64, so that floors such as 0.7 round as in the formula.
        floor = (base.double() * self.floor).floor()
        return (best.float() * (1 - self.floor) + floor).round().long() + costs.protected


@dataclass(frozen=True)
class AdaptiveRows(Budget):
    """Competition of all heads of all layers, block by block (KV-Compress 4.2.2).

    The excess of a sequence is counted in blocks; the blocks whose costliest KV is cheapest are freed.
    """

    def costs(self, ranking: Ranking) -> RowCosts:
        return RowCosts.of(ranking, block_costs(ranking.sorted_score, ranking.length, ranking.block_size))

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        kept = -(-costs.round.budget * costs.num_rows // costs.block_size)
        excess = (costs.blocks.sum(dim=(1, 2)) - kept).clamp_min(0)
        cost, most = costs.cost, None
        if self.has_floors:
            cost = above_floor(cost, costs.length, self.row_least(costs), costs.block_size)
            most = costs.blocks.sum(dim=2) - self.layer_least_blocks(costs)
        freed = cheapest_blocks(cost, excess, most)
        return length_without(costs.length, freed, costs.block_size)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        even = ceil_div(budget * layout.rows_per_seq, layout.block_size)
        if self.has_floors:
            return even + layout.rows_per_seq  # floors need not be multiples of blocks
        return max(even, layout.blocks_for(protected))


def _lowest(cost: Tensor, count: Tensor) -> Tensor:
    """Return how many of the `count`, [B, L], lowest KVs of a layer each head has, int64 [B, L, H].

    Costs are float32 [B, L, H, N], +inf for KVs that cannot be evicted. Ties are evicted from the lower head first.
    """
    heads, slots = cost.shape[2:]
    order = cost.flatten(2).sort(dim=-1, stable=True).indices
    taken = torch.arange(heads * slots, device=cost.device) < count[..., None]
    lost = torch.zeros_like(taken).scatter_(-1, order, taken)
    return lost.unflatten(2, (heads, slots)).sum(dim=-1)


def without_best(cost: Tensor, length: Tensor, least: Tensor) -> Tensor:
    """Return `cost`, [B, L, H, N], ascending, with +inf for the `least`, int64 [B, L, H], best KVs of each row."""
    place = torch.arange(cost.shape[-1], device=cost.device)
    return cost.masked_fill(place >= (length - least)[..., None], torch.inf)


def block_costs(score: Tensor, length: Tensor, block_size: int) -> Tensor:
    """Return the cost of freeing each row's first, second, ... block.

    A row of n KVs frees its first block when its n mod b (b if that is 0) lowest KVs are evicted, each further one with
    b more; the cost of a block is the highest score among the KVs evicted for it (KV-Compress eq. 16-18; the paper gets
    the same by giving empty slots the metric 0). Costs rise along a row.

    A row may lose its last block. Eq. 16 (e < ceil(C/b)) forbids it, Figure 5 does it ("it would evict the lone block
    of its second head"), and so must the N sets of a head with N blocks (eq. 13): eq. 16 is one short. What has to stay
    in a row is for protection and floors to say (`above_floor`); a row without KVs is sound, since a query writes its
    own before it reads.

    Scores are float32 [B, L, H, N], ascending, +inf for KVs that cannot be evicted and past the length; costs [B, L, H,
    ceil(N / b)], +inf where there is no such block.
    """
    last = _last_evicted(length, ceil_div(score.shape[-1], block_size), block_size)
    cost = score.gather(-1, last.clamp_max(score.shape[-1] - 1))
    return cost.masked_fill_(last >= length[..., None], torch.inf)


def above_floor(cost: Tensor, length: Tensor, least: Tensor, block_size: int) -> Tensor:
    """Return `block_costs`, +inf for blocks whose eviction would leave a row less than `least` KVs, int64 [B, L, H]."""
    last = _last_evicted(length, cost.shape[-1], block_size)
    return cost.masked_fill(last >= (length - least)[..., None], torch.inf)


def _last_evicted(length: Tensor, blocks: int, block_size: int) -> Tensor:
    """Return the index, by ascending scores, of the last KV evicted for each block: int64 [B, L, H, blocks]."""
    first = (length - 1) % block_size
    return first[..., None] + torch.arange(blocks, device=length.device) * block_size


def cheapest_blocks(cost: Tensor, excess: Tensor, most: Tensor | None = None) -> Tensor:
    """Choose the blocks that a sequence frees: the `excess` cheapest ones, or all that can be freed.

    Costs rise along a row, so the cheapest blocks of all rows are always the first ones of each. Ties are taken from
    the lower layer, then the lower head. Each limit holds for a row (+inf in `cost`), a layer or all, so taking the
    cheapest within each in turn is cheapest for all of them.

    Args:
        cost: float32 [B, L, H, E] as `block_costs` returns it.
        excess: int64 [B], blocks to free.
        most: int64 [B, L], blocks that a layer may free; None: all.

    Returns:
        Blocks to free in each row, int64 [B, L, H].
    """
    if most is not None:
        cost = cost.masked_fill(ranks(cost.flatten(2)).view_as(cost) >= most[..., None, None], torch.inf)
    shape = cost.shape[1:]
    cost, order = cost.flatten(1).sort(dim=-1, stable=True)
    taken = (torch.arange(cost.shape[1], device=cost.device) < excess[:, None]) & (cost < torch.inf)
    freed = torch.zeros_like(taken).scatter_(-1, order, taken)
    return freed.unflatten(1, shape).sum(dim=-1)


def length_without(length: Tensor, freed: Tensor, block_size: int) -> Tensor:
    kept = (-(-length // block_size) - freed) * block_size
    return torch.minimum(length, kept)
