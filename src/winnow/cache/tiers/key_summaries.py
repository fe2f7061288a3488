"""Summaries on the device of blocks whose keys lie on a tier: the least and the largest of each channel, or the mean.

A summary grows with its block as KVs are stored. Where KVs were moved or came from elsewhere it is stale, and made anew
from the keys before it is read.
"""

import torch
from torch import Tensor

from winnow.cache.row_groups import BlockKind


class KeySummaries:
    """Summaries of the keys of blocks on a tier, counted from the first of them.

    Attributes:
        low, high: float32 [num_blocks, d], of each channel; with means both are the sum, one tensor.
        stale: bool [num_blocks].
    """

    def __init__(self, kind: BlockKind, num_blocks: int, device: torch.device | str) -> None:
        assert kind.tier is not None, "there is a tier"
        self.means = kind.tier.select == "means"
        self.low = torch.zeros(num_blocks, kind.key_size, dtype=torch.float32, device=device)
        self.high = self.low if self.means else torch.zeros_like(self.low)
        self.stale = torch.ones(num_blocks, dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return self.low.nbytes * (1 if self.means else 2) + self.stale.nbytes

    def add(self, block: Tensor, offset: Tensor, k: Tensor) -> None:
        """Add keys, [n, d], stored in slots of blocks, int64 [n] each; the first of a block starts it anew."""
        fresh = block[offset == 0]
        self.stale[fresh] = False
        self.low[fresh] = 0.0 if self.means else torch.inf
        if not self.means:
            self.high[fresh] = -torch.inf
        index, keys = block[:, None].expand_as(k), k.float()
        if self.means:
            self.low.scatter_add_(0, index, keys)
            return
        self.low.scatter_reduce_(0, index, keys, "amin")
        self.high.scatter_reduce_(0, index, keys, "amax")

    def make(self, block: Tensor, keys: Tensor, valid: Tensor) -> None:
        """Summarise blocks, int64 [n], anew, from keys, float32 [n, block_size, d], of the slots that are valid."""
        there = valid[..., None]
        if self.means:
            self.low[block] = keys.masked_fill(~there, 0.0).sum(dim=1)
        else:
            self.low[block] = keys.masked_fill(~there, torch.inf).amin(dim=1)
            self.high[block] = keys.masked_fill(~there, -torch.inf).amax(dim=1)
        self.stale[block] = False
