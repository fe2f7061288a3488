"""Costs of evicting from each row, per rank or of all ranks together."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from winnow.attention.ranked_rows import RankedRows, score_of
from winnow.eviction.round_rows import RoundInputs, RoundRows
from winnow.process.ranks import Ranks


@dataclass(frozen=True)
class Ranking:
    """The rows of B sequences, L layers and H heads, with the scores of their KVs.

    Rows are sorted only for a budget that asks for their order.
    """

    rows: RoundRows  # layers first
    score: Tensor  # float32 [L, B, H, N], of each KV; arbitrary past the length
    must_stay: Tensor  # bool [L, B, H, N], False past the length

    @property
    def round(self) -> RoundInputs:
        return self.rows.round

    @property
    def block_size(self) -> int:
        return self.rows.cache.pool.layout.block_size

    @cached_property
    def length(self) -> Tensor:
        return self.rows.length.transpose(0, 1).long()

    @cached_property
    def protected(self) -> Tensor:
        """Number of KVs of each row that must stay, int64 [B, L, H]."""
        return self.must_stay.sum(dim=-1).transpose(0, 1)

    @cached_property
    def sorted_score(self) -> Tensor:
        """float32 [B, L, H, N], ascending; +inf for protected KVs and past the length."""
        return score_of(self.ranked.sorted_key).transpose(0, 1)

    @cached_property
    def ranked(self) -> RankedRows:
        rows = self.rows
        return RankedRows(rows.block, rows.length, rows.position, self.score, self.must_stay)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of every entry of `values`, [..., N], within its row; ties go to the first."""
    order = values.argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


@dataclass(frozen=True)
class RowCosts:
    """The rows of B sequences, L layers and H KV heads as a budget sees them.

    With tensor parallelism each rank computes those of its own heads, and `over` puts the ranks together.

    Attributes:
        length: KVs of each row, int64 [B, L, H].
        protected: how many of them must stay, int64 [B, L, H].
        cost: float32 [B, L, H, E], ascending: the cost of evicting one unit more from the row, a KV or a block as the
            budget counts; +inf where nothing is left to evict. None for budgets that do not compare KVs.
    """

    round: RoundInputs
    block_size: int
    length: Tensor
    protected: Tensor
    cost: Tensor | None = None
    missing: int = 0
    """Number of the L x H rows that do not exist, since their layers have fewer heads."""

    @classmethod
    def of(cls, ranking: Ranking, cost: Tensor | None = None) -> "RowCosts":
        missing = ranking.rows.missing
        return cls(ranking.round, ranking.block_size, ranking.length, ranking.protected, cost, missing)

    def over(self, ranks: Ranks) -> "RowCosts":
        if ranks.size == 1:
            return self
        length, protected = ranks.join(torch.stack([self.length, self.protected]), 3)
        cost, missing = None if self.cost is None else ranks.join(self.cost, 2), self.missing * ranks.size
        return replace(self, length=length, protected=protected, cost=cost, missing=missing)

    @property
    def num_layers(self) -> int:
        return self.length.shape[1]

    @property
    def num_heads(self) -> int:
        return self.length.shape[2]

    @property
    def num_rows(self) -> int:
        return self.num_layers * self.num_heads - self.missing

    @cached_property
    def blocks(self) -> Tensor:
        return -(-self.length // self.block_size)
