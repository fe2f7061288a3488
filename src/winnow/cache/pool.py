"""The memory itself: every KV of every row, in blocks."""

import torch
from torch import Tensor

from winnow.cache.layout import CacheLayout
from winnow.cache.memory import empty_in_large_pages


class KVPool:
    """One pool for all layers and heads of all sequences.

    Attributes:
        kv: [num_blocks, 2, block_size, head_dim]: the keys of each block and then its values, since what is read
            together should be one stretch of memory.
        k, v: [num_blocks, block_size, head_dim], views of it; keys are stored rotated at their position.
        position: int32 [num_blocks, block_size], the token's index in its sequence.
        score: float32 [num_scores, num_blocks, block_size], what attention added up for each KV.

    Memory is left uninitialised: a slot is written before any length lets it be read.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        slots = (num_blocks, layout.block_size)
        self.kv = empty_in_large_pages(
            (num_blocks, 2, layout.block_size, layout.head_dim), layout.dtype, device
        )
        self.k, self.v = self.kv.unbind(1)
        self.position = empty_in_large_pages(slots, torch.int32, device)
        self.score = empty_in_large_pages((layout.num_scores, *slots), torch.float32, device)

    @property
    def num_blocks(self) -> int:
        return self.kv.shape[0]

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.position.nbytes + self.score.nbytes

    def place(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Flat slot numbers, block * block_size + offset, as an index into `k` and `v`."""
        return slot // self.layout.block_size, slot % self.layout.block_size

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, int32 [n] each. No target may also be a source."""
        for field in (self.kv, self.position):
            field[target] = field[source]
        self.score[:, target] = self.score[:, source]
