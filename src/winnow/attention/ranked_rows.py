"""Rows whose KVs are scored: the order of eviction, and the moves that compact the rows."""

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class RankedRows:
    """Ranked KVs of rows of any shape [...], padded to N slots in n blocks each.

    The lowest score is evicted first; ties go to the older KV, so the younger stays.

    Attributes:
        block: int64 [..., n], the blocks of each row.
        length: int32 [...], KVs of each row.
        position: int32 [..., N], arbitrary past the length; no two KVs of a row have the same.
        score: float32 [..., N], arbitrary past the length.
        must_stay: bool [..., N], protected KVs; False past the length.
    """

    block: Tensor
    length: Tensor
    position: Tensor
    score: Tensor
    must_stay: Tensor

    def __getitem__(self, rows: Tensor | int | tuple[int, ...]) -> "RankedRows":
        return RankedRows(*(getattr(self, each.name)[rows] for each in fields(self)))

    @cached_property
    def valid(self) -> Tensor:
        return torch.arange(self.score.shape[-1], device=self.score.device) < self.length[..., None]

    @cached_property
    def key(self) -> Tensor:
        return sort_key(self.score, self.position, self.must_stay, self.valid)

    @cached_property
    def sorted_key(self) -> Tensor:
        return self.key.sort(dim=-1).values

    def lowest(self, count: Tensor, most: int) -> Tensor:
        """Return the mask, bool [..., N], of the `count` first evicted KVs of each row, int64 [...], at most `most`."""
        if most == 0:
            return torch.zeros_like(self.key, dtype=torch.bool)
        few = most * 4 <= self.key.shape[-1]  # which are found much faster than all are sorted
        first = self.key.topk(most, largest=False).values if few else self.sorted_key
        last = first.gather(-1, (count - 1).clamp_min(0)[..., None])
        return (self.key <= last) & (count > 0)[..., None]


def sort_key(score: Tensor, position: Tensor, protected: Tensor, valid: Tensor) -> Tensor:
    """Return one integer per KV that orders like (score, position); protected KVs come last, then what is not valid.

    All arguments and the result are [..., N]; the result is int64, and distinct for the valid KVs of a row.
    """
    # Adding zero turns -0.0 into 0.0, which is its equal and has other bits.
    bits = (score.float() + 0.0).masked_fill_(protected, torch.inf).view(torch.int32)
    # Flipping the magnitude of negative floats makes their bits order like the numbers.
    key = _ordered(bits).long().bitwise_left_shift_(32).bitwise_or_(position)
    return key.masked_fill_(~valid, _LAST)


def score_of(key: Tensor) -> Tensor:
    """Return the score in sort keys, float32; +inf for protected KVs and where not valid."""
    score = _ordered((key >> 32).int()).view(torch.float32)
    return score.masked_fill_(key == _LAST, torch.inf)


def moves(stays: Tensor, kept: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the moves by which each row's survivors fill its first slots (KV-Compress Algorithm 1, all rows at once).

    A row that keeps m KVs has as many holes below m as survivors at or above it: the i-th survivor fills the i-th hole.
    `stays` is bool [..., N], `kept` the number of survivors, int64 [...], `block` int64 [..., n], N / n slots each.
    Returns flat numbers of source and target slots, int64 [m] each, disjoint.
    """
    front = torch.arange(stays.shape[-1], device=stays.device) < kept[..., None]
    return _slots_where(stays & ~front, block), _slots_where(front & ~stays, block)


def _slots_where(mask: Tensor, block: Tensor) -> Tensor:
    size = mask.shape[-1] // block.shape[-1]
    *row, n = mask.nonzero(as_tuple=True)
    return block[(*row, n // size)] * size + n % size


def _ordered(bits: Tensor) -> Tensor:
    """Return the bits of float32 as integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
