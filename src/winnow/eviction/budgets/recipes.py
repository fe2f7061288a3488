"""A budget by recipes: each head keeps the smallest token set that recovers its attention (FastGen)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.errors import ConfigError
from winnow.eviction.budgets.base import Budget
from winnow.eviction.costs import RowCosts
from winnow.eviction.ranking import sort_rows
from winnow.eviction.round_rows import LayerRows

SPECIAL, PUNCTUATION = 1, 2
"""Kinds of tokens; 0 is any other."""


@dataclass(frozen=True)
class Recipes(Budget):
    """The smallest of several token sets that recovers the share `recovery` of a head's attention.

    The sets, each including the one before: special tokens; with punctuation; with the `heavy` share of KVs that got
    most attention; with the `local` share of KVs nearest to the end; all. Protected KVs are in every set. Requires the
    scorer `Cumulative`.
    """

    bounded: ClassVar[bool] = False
    needs_kinds: ClassVar[bool] = True
    recovery: float = 0.9
    heavy: float = 0.3
    local: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.row_floor, float) or self.layer_floor or self.wide_factor is not None:
            raise ConfigError("Recipes knows no even share: row_floor must be a count, wide layers keep all")
        for name in ("recovery", "heavy", "local"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} must be between 0 and 1, got {getattr(self, name)}")

    @property
    def fixed(self) -> int:
        return 1  # a head whose attention one special token recovers keeps one KV

    def pin(self, rows: LayerRows) -> Tensor:
        mass = rows.accumulators[0].masked_fill(~rows.valid, 0.0)
        chosen, found = rows.valid, torch.zeros_like(rows.valid[..., :1])
        for kept in self._ladder(rows, mass):
            recovers = (mass * kept).sum(-1, keepdim=True) >= self.recovery * mass.sum(-1, keepdim=True)
            chosen = torch.where(recovers & ~found, kept, chosen)
            found |= recovers
        return chosen

    def layer_stats(self, rows: LayerRows) -> Tensor:
        return self.pin(rows).sum(dim=-1).float()

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.stats is not None, "set by `layer_stats`"
        return torch.maximum(costs.stats.long(), self.row_least(costs))

    def _ladder(self, rows: LayerRows, mass: Tensor) -> list[Tensor]:
        special = rows.protected | (rows.valid & (rows.kind == SPECIAL))
        punctuation = special | (rows.valid & (rows.kind == PUNCTUATION))
        count = (rows.length.float() * self.heavy).long()[..., None]
        _, order = sort_rows(mass, rows.position, torch.zeros_like(rows.valid), rows.valid)
        lowest = (rows.length[..., None] - count).clamp_min(0)  # number of KVs outside the heavy set
        heavy = punctuation | (rows.valid & (order.argsort(dim=-1) >= lowest))
        near = (rows.round.tokens.float() * self.local).long()[:, None, None]
        return [special, punctuation, heavy, heavy | (rows.valid & (rows.age() < near))]
