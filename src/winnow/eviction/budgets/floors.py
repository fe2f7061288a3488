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

    def __post_init__(self) -> None:
        for name in ("row_floor", "layer_floor"):
            value = getattr(self, name)
            if not (0.0 <= value <= 1.0 if isinstance(value, float) else value >= 0):
                raise ConfigError(
                    f"{name} must be a count, or a share between 0.0 and 1.0 of the even share, got {value}"
                )

    @property
    def has_floors(self) -> bool:
        return bool(self.row_floor or self.layer_floor)

    def row_least(self, costs: RowCosts) -> Tensor:
        """Return the floor of each row, int64 [B, L, H]; at most its length."""
        return torch.minimum(self._amount(self.row_floor, costs.round.budget)[:, None, None], costs.length)

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
        budget = costs.round.budget
        floor = torch.maximum(self._amount(self.row_floor, budget), self._amount(self.layer_floor, budget))
        least = torch.maximum(floor[:, None], costs.protected.amax(dim=2))
        above = (shares - least).clamp_min(0)
        room = (shares.sum(dim=1) - least.sum(dim=1)).clamp_min(0)
        return least + above * room[:, None] // above.sum(dim=1, keepdim=True).clamp_min(1)

    def _amount(self, floor: int | float, budget: Tensor) -> Tensor:
        """Return a floor in KVs, int64 [B]."""
        if isinstance(floor, int):
            return budget.clamp_max(floor)
        exact = Fraction(str(floor))  # the decimal as written, rounded down
        return budget * exact.numerator // exact.denominator
