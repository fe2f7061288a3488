"""Bytes of blocks, and parts of them that are copied as they are."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.cache.codec import BlockFormat
from winnow.cache.formats import Field
from winnow.cache.memory import empty_in_large_pages

# Integers as which bytes are copied, the widest first.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Storage(NamedTuple):
    """Bytes of blocks, uint8 [num_blocks, bytes of a block], and what lies in them."""

    data: Tensor
    form: BlockFormat

    @property
    def words(self) -> Tensor:
        return self.data.view(widest_word(self.form))

    def view(self, field: Field, offset: int, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return the bytes of a field as [num_blocks, block_size, elements of `dtype`]."""
        nbytes = block_size * field.slot_bytes
        return self.data.narrow(1, offset, nbytes).view(dtype).unflatten(1, (block_size, -1))


@dataclass(frozen=True)
class BlockPart:
    """A part of what blocks hold, [num_blocks, width], in tensors of [num_blocks, columns] beside each other."""

    pieces: tuple[Tensor, ...]

    @classmethod
    def of(cls, storages: tuple[Storage, ...]) -> "BlockPart":
        if len(storages) == 1:
            return cls((storages[0].words,))
        return cls(tuple(storage.data.view(torch.int64) for storage in storages))

    @property
    def width(self) -> int:
        return sum(tensor.shape[1] for tensor in self.pieces)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def read(self, index: Tensor, out: Tensor) -> None:
        """Copy what blocks at an index, int64 [n] on the pool's device, hold to `out`, [n, width], in host memory."""
        for tensor, columns in zip(self.pieces, self._columns(out), strict=True):
            if tensor.device.type == "cpu":
                torch.index_select(tensor, 0, index.cpu(), out=columns)
            else:
                columns.copy_(tensor.index_select(0, index))

    def write(self, index: Tensor, data: Tensor) -> None:
        """Copy `data`, [n, width], in host memory, to the blocks at an index, int64 [n] on the pool's device."""
        for tensor, columns in zip(self.pieces, self._columns(data), strict=True):
            tensor.index_copy_(0, index.to(tensor.device), columns.to(tensor.device))

    def _columns(self, data: Tensor) -> tuple[Tensor, ...]:
        return data.split([tensor.shape[1] for tensor in self.pieces], dim=1)


def widest_word(form: BlockFormat) -> torch.dtype:
    sizes = [size for field, offset in form.fields for size in (offset, field.slot_bytes)]
    return next(word for word in _WORDS if all(n % word.itemsize == 0 for n in (form.nbytes, *sizes)))


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
        self.accumulators.flatten(1)[:count, slot] = 0.0

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        self.position[target] = self.position[source]
        self.accumulators[:, target] = self.accumulators[:, source]

    def move(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        self.position[target] = self.position[source]
        self.accumulators[:, *target] = self.accumulators[:, *source]


def _of_blocks(each: Tensor, block: Tensor) -> Tensor:
    # Copies whole blocks, where indexing would look up each number.
    found = each.index_select(-2, block.flatten())
    return found.view(*each.shape[:-2], *block.shape[:-1], -1)
