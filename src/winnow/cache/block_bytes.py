"""Bytes of blocks, and parts of them that are copied as they are."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.cache.codec import BlockFormat
from winnow.cache.formats import Field

# Integers as which bytes are copied, the widest first.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Storage(NamedTuple):
    """Bytes of blocks, uint8 [num_blocks, bytes of a block], and what lies in them."""

    data: Tensor
    form: BlockFormat

    @property
    def words(self) -> Tensor:
        """`data` viewed as the widest integers that divide every field: [num_blocks, words of a block]."""
        return self.data.view(widest_word(self.form))

    def view(self, field: Field, offset: int, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return the bytes of a field as [num_blocks, block_size, elements of `dtype`]."""
        nbytes = block_size * field.slot_bytes
        return self.data.narrow(1, offset, nbytes).view(dtype).unflatten(1, (block_size, -1))


@dataclass(frozen=True)
class BlockPart:
    """A part of what blocks hold, [num_blocks, width], in one tensor or in several beside each other.

    Attributes:
        pieces: tensors of [num_blocks, columns].
    """

    pieces: tuple[Tensor, ...]

    @classmethod
    def of(cls, storages: tuple[Storage, ...]) -> "BlockPart":
        """Return the KVs of blocks, as words."""
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
    """Return the widest integers that divide every field of a block."""
    sizes = [size for field, offset in form.fields for size in (offset, field.slot_bytes)]
    return next(word for word in _WORDS if all(n % word.itemsize == 0 for n in (form.nbytes, *sizes)))
