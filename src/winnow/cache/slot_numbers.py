"""Numbers that every slot has, whatever its KV: a position and accumulators."""

import torch
from torch import Tensor

from winnow.cache.memory import empty_in_large_pages


class SlotNumbers:
    """Positions and accumulators of the slots of all blocks. A slot has the flat number block * block_size + offset.

    Attributes:
        position: int32 [num_blocks, block_size], the token's index in its sequence.
        accumulators: float32 [num_accumulators, num_blocks, block_size], what attention added up for each KV.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_accumulators: int, device: torch.device | str = "cpu"
    ) -> None:
        slots = (num_blocks, block_size)
        self.position = empty_in_large_pages(slots, torch.int32, device)
        self.accumulators = empty_in_large_pages((num_accumulators, *slots), torch.float32, device)
        self._block_size = block_size

    @property
    def device(self) -> torch.device:
        return self.position.device

    @property
    def nbytes(self) -> int:
        return self.position.nbytes + self.accumulators.nbytes

    def place(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Convert flat slot numbers to an index into tensors of [num_blocks, block_size, ...]."""
        return slot // self._block_size, slot % self._block_size

    def slots_of(self, block: Tensor) -> Tensor:
        """Return the flat numbers of all slots of blocks, int64 [..., n]: int64 [..., n * block_size]."""
        offset = torch.arange(self._block_size, device=block.device)
        return (block[..., None] * self._block_size + offset).flatten(-2)

    def positions_of(self, block: Tensor) -> Tensor:
        """Return the positions in all slots of blocks, int64 [..., n]: int32 [..., n * block_size]."""
        return _of_blocks(self.position, block)

    def accumulated(self, block: Tensor) -> Tensor:
        """Return the accumulators of blocks, int64 [..., n]: float32 [num_accumulators, ..., n * block_size]."""
        return _of_blocks(self.accumulators, block)

    def clear_accumulators(self, slot: Tensor, count: int) -> None:
        """Set the first `count` accumulators of slots, int64 [...], to 0."""
        self.accumulators.flatten(1)[:count, slot] = 0.0

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy the numbers of whole blocks, int64 [n] each."""
        self.position[target] = self.position[source]
        self.accumulators[:, target] = self.accumulators[:, source]

    def move(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Copy the numbers of slots, given by block and offset, int64 [n] each."""
        self.position[target] = self.position[source]
        self.accumulators[:, *target] = self.accumulators[:, *source]


def _of_blocks(each: Tensor, block: Tensor) -> Tensor:
    """Return what tensors of [..., num_blocks, size] hold for blocks, int64 [*, n]: [..., *, n * size]."""
    # Copies whole blocks, where indexing would look up each number.
    found = each.index_select(-2, block.flatten())
    return found.view(*each.shape[:-2], *block.shape[:-1], -1)
