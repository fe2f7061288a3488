"""The order of eviction of the KVs of each row."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from winnow.attention.ranked_rows import RankedRows, score_of
from winnow.eviction.round_rows import RoundInputs, RoundRows


@dataclass(frozen=True)
class Ranking:
    """The rows of B sequences, L layers and H heads, with the scores of their KVs.

    Rows are sorted only for a budget that asks for their order.

    Attributes:
        rows: positions, lengths and blocks of the rows, layers first.
        score: float32 [L, B, H, N], of each KV; arbitrary past the length.
        must_stay: bool [L, B, H, N], False past the length.
    """

    rows: RoundRows
    score: Tensor
    must_stay: Tensor

    @property
    def round(self) -> RoundInputs:
        return self.rows.round

    @property
    def block_size(self) -> int:
        return self.rows.cache.pool.layout.block_size

    @cached_property
    def length(self) -> Tensor:
        """KVs of each row, int64 [B, L, H]."""
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
        """The rows in the order of eviction."""
        rows = self.rows
        return RankedRows(rows.block, rows.length, rows.position, self.score, self.must_stay)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of every entry of `values`, [..., N], within its row; ties go to the first."""
    order = values.argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
