"""The order in which the KVs of each row would go."""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.eviction.rows import Round


@dataclass(frozen=True)
class Ranking:
    """The rows of B sequences, L layers and H heads, each sorted by what its KVs are worth.

    Attributes:
        worth: float32 [B, L, H, N], ascending; +inf for protected KVs and past the length.
        order: int64 [B, L, H, N], the index within the row of each entry of `worth`.
        length: int64 [B, L, H], KVs of each row.
        protected: int64 [B, L, H], how many of them must stay.
        told: float32 [B, L, H], what the budget's `tell` said; empty if nothing.
    """

    round: Round
    worth: Tensor
    order: Tensor
    length: Tensor
    protected: Tensor
    told: Tensor
    block_size: int

    @property
    def num_layers(self) -> int:
        return self.length.shape[1]

    @property
    def num_heads(self) -> int:
        return self.length.shape[2]

    @property
    def blocks(self) -> Tensor:
        """Blocks of each row, int64 [B, L, H]."""
        return -(-self.length // self.block_size)


def sort_rows(worth: Tensor, position: Tensor, protected: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by worth, the older first among equals, protected KVs last, then what is not valid.

    All arguments [..., N]. One sort: worth and position make one integer that orders as the pair does.

    Returns:
        Sorted worth (+inf for protected and not valid) and the order, int64, both [..., N].
    """
    # Adding zero turns -0.0 into 0.0, which is its equal and has other bits.
    bits = (worth.float() + 0.0).masked_fill_(protected, torch.inf).view(torch.int32)
    # Flipping the magnitude of negative floats makes their bits order like the numbers.
    key = (_ordered(bits).long() << 32) | position.long()
    key, order = key.masked_fill_(~valid, torch.iinfo(torch.int64).max).sort(dim=-1)
    sorted_worth = _ordered((key >> 32).int()).view(torch.float32)
    past = torch.arange(valid.shape[-1], device=valid.device) >= valid.sum(dim=-1, keepdim=True)
    return sorted_worth.masked_fill_(past, torch.inf), order


def _ordered(bits: Tensor) -> Tensor:
    """The bits of float32 as integers in the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def ranks(values: Tensor) -> Tensor:
    """The place of every entry of `values`, [..., N], when its row is sorted; of equals the first comes first."""
    order = values.argsort(dim=-1, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)
