"""Minimum numbers of KVs of rows and layers."""

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.eviction.costs import RowCosts


@dataclass(frozen=True)
class Floors:
    """Minimum numbers of KVs per row.

    The even share is the number of KVs per row on average after a round. A floor is a share of it (a float between 0.0
    and 1.0) or a number of KVs (an int), which is capped at the even share.
    """

    row_floor: int | float = field(default=0, kw_only=True)
    """Minimum of every row; shorter rows keep all KVs."""
    layer_floor: int | float = field(default=0, kw_only=True)
    """Minimum of every layer, per row on average."""
    wide_layers: int = field(default=0, kw_only=True)
    """Number of first layers that keep all KVs, or `wide_factor` even shares per row, as far as the budget allows once
    all others have their floors."""
    wide_factor: float | None = field(default=None, kw_only=True)
    """Even shares per row of wide layers, at least 1.0; None: all KVs."""

    def __post_init__(self) -> None:
        for name in ("row_floor", "layer_floor"):
            value = getattr(self, name)
            if not (0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0):
                raise ConfigError(
                    f"{name} must be a count, or a share between 0.0 and 1.0 of the even share, got {value}"
                )
        if self.wide_layers < 0:
            raise ConfigError(f"wide_layers must be at least 0, got {self.wide_layers}")
        if self.wide_factor is not None and not self.wide_factor >= 1.0:
            raise ConfigError(f"wide_factor must be at least 1.0, got {self.wide_factor}")

    @property
    def has_floors(self) -> bool:
        return bool(self.row_floor or self.layer_floor or self.wide_layers)

    def row_least(self, costs: RowCosts) -> Tensor:
        """Return the floor of each row, int64 [B, L, H]; at most its length."""
        least = self._amount(self.row_floor, costs.round.budget)[:, None].expand(-1, costs.num_layers)
        least = self._widened(costs, least, self._layer_least(costs))
        return torch.minimum(least[:, :, None], costs.length)

    def layer_least_blocks(self, costs: RowCosts) -> Tensor:
        """Return the floor of each layer in blocks, int64 [B, L]."""
        kvs = self._amount(self.layer_floor, costs.round.budget) * costs.num_heads
        least = -(-kvs // costs.block_size)
        return torch.minimum(least[:, None], costs.blocks.sum(dim=2))

    def raised(self, costs: RowCosts, shares: Tensor) -> Tensor:
        """Raise shares of layers, KVs per row, int64 [B, L], to their floors.

        Other layers give up the difference in proportion to their excess over their own floors.
        """
        if not self.has_floors:
            return shares
        least = self._layer_least(costs)
        least = self._widened(costs, least, least)
        above = (shares - least).clamp_min(0)
        room = (shares.sum(dim=1) - least.sum(dim=1)).clamp_min(0)
        return least + above * room[:, None] // above.sum(dim=1, keepdim=True).clamp_min(1)

    def _layer_least(self, costs: RowCosts) -> Tensor:
        """Return the floor of each layer as a layer that is not wide, KVs per row, int64 [B, L]."""
        budget = costs.round.budget
        floor = torch.maximum(self._amount(self.row_floor, budget), self._amount(self.layer_floor, budget))
        return torch.maximum(floor[:, None], costs.protected.amax(dim=2))

    def _widened(self, costs: RowCosts, least: Tensor, layer_least: Tensor) -> Tensor:
        """Raise `least`, [B, L], of wide layers to their width."""
        wide = min(self.wide_layers, costs.num_layers)
        if not wide:
            return least
        budget, held = costs.round.budget, costs.length.amax(dim=2)[:, :wide]
        left = budget * costs.num_layers - layer_least[:, wide:].sum(dim=1)
        wanted = held
        if self.wide_factor is not None:
            wanted = torch.minimum(held, _times(budget, self.wide_factor)[:, None])
        wanted = torch.minimum(wanted, torch.maximum(left // wide, budget)[:, None])
        return torch.cat([torch.maximum(least[:, :wide], wanted), least[:, wide:]], dim=1)

    def _amount(self, floor: int | float, budget: Tensor) -> Tensor:
        """Return a floor in KVs, int64 [B]."""
        if isinstance(floor, float):
            return _times(budget, floor)
        return budget.clamp_max(floor)


def _times(budget: Tensor, factor: float) -> Tensor:
    """Return the product with the decimal as written, rounded down."""
    exact = Fraction(str(factor))
    return budget * exact.numerator // exact.denominator
