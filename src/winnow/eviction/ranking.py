"""The order in which the KVs of each row would go."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from winnow.eviction.rows import RoundInputs, RoundRows


@dataclass(frozen=True)
class Ranking:
    """The rows of B sequences, L layers and H heads, and what their KVs are worth.

    Rows are sorted when a budget asks for their order; one that knows how many KVs must go needs no more than `lowest`.

    Attributes:
        rows: what is known of the KVs, layers first.
        score: float32 [L, B, H, N], of each KV; arbitrary past the length.
        must_stay: bool [L, B, H, N], False past the length.
        stats: float32 [B, L, H], what the budget's `layer_stats` returned; None if it has none.
    """

    rows: RoundRows
    score: Tensor
    must_stay: Tensor
    stats: Tensor | None

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
        """How many KVs of each row must stay, int64 [B, L, H]."""
        return self.must_stay.sum(dim=-1).transpose(0, 1)

    @cached_property
    def sorted_score(self) -> Tensor:
        """float32 [B, L, H, N], ascending; +inf for protected KVs and past the length."""
        return _worth_of(self._sorted).transpose(0, 1)

    @cached_property
    def _key(self) -> Tensor:
        return sort_key(self.score, self.rows.position, self.must_stay, self.rows.valid)

    @cached_property
    def _sorted(self) -> Tensor:
        return self._key.sort(dim=-1).values

    def lowest(self, count: Tensor, most: int) -> Tensor:
        """Mark the KVs of each row that would go first: bool [L, B, H, N].

        Args:
            count: how many of each row, int64 [L, B, H]; no more than it has.
            most: the largest of them.
        """
        if most == 0:
            return torch.zeros_like(self._key, dtype=torch.bool)
        # A few are found much faster than all are sorted.
        few = most * 4 <= self._key.shape[-1]
        first = self._key.topk(most, largest=False).values if few else self._sorted
        last = first.gather(-1, (count - 1).clamp_min(0)[..., None])
        return (self._key <= last) & (count > 0)[..., None]


def sort_rows(score: Tensor, position: Tensor, protected: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by score, the older first among equals, protected KVs last, then what is not valid.

    All arguments [..., N].

    Returns:
        Sorted scores (+inf for protected and not valid) and the order, int64, both [..., N].
    """
    key, order = sort_key(score, position, protected, valid).sort(dim=-1)
    return _worth_of(key), order


def sort_key(worth: Tensor, position: Tensor, protected: Tensor, valid: Tensor) -> Tensor:
    """One integer for worth and position that orders KVs as the pair does; protected ones last, then what is not valid.

    All arguments [..., N]; so is what comes back, int64. No two valid KVs of a row have the same.
    """
    # Adding zero turns -0.0 into 0.0, which is its equal and has other bits.
    bits = (worth.float() + 0.0).masked_fill_(protected, torch.inf).view(torch.int32)
    # Flipping the magnitude of negative floats makes their bits order like the numbers.
    key = _ordered(bits).long().bitwise_left_shift_(32).bitwise_or_(position)
    return key.masked_fill_(~valid, _LAST)


def _worth_of(key: Tensor) -> Tensor:
    """The worth in sort keys; +inf where not valid."""
    worth = _ordered((key >> 32).int()).view(torch.float32)
    return worth.masked_fill_(key == _LAST, torch.inf)


def _ordered(bits: Tensor) -> Tensor:
    """The bits of float32 as integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def ranks(values: Tensor) -> Tensor:
    """The place of every entry of `values`, [..., N], when its row is sorted; of equals the first comes first."""
    order = values.argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


_LAST = torch.iinfo(torch.int64).max
