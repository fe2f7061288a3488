"""The fields of consecutive blocks, where they lie."""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class BlockPart:
    """A part of what blocks hold, [num_blocks, width], in one tensor or in several.

    Attributes:
        pieces: tensors of [n, columns], each with the id of its first block and the part's column of its first one.
    """

    pieces: tuple[tuple[Tensor, int, int], ...]
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> "BlockPart":
        return cls(((tensor, 0, 0),), tensor.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][0].dtype

    @property
    def device(self) -> torch.device:
        return self.pieces[0][0].device

    def read(self, block: Tensor, out: Tensor) -> None:
        """Copy what blocks, int64 [n] on the pool's device, hold to `out`, [n, width], in host memory."""
        for tensor, first, column in self.pieces:
            columns = out[:, column : column + tensor.shape[1]]
            if len(self.pieces) == 1:
                if tensor.device.type == "cpu":
                    torch.index_select(tensor, 0, block, out=columns)
                else:
                    columns.copy_(tensor.index_select(0, block))
                continue
            here = (block >= first) & (block < first + len(tensor))
            index = (block[here] - first).to(tensor.device)
            columns[here.to(out.device)] = tensor.index_select(0, index).to(out.device)

    def write(self, block: Tensor, data: Tensor) -> None:
        """Let blocks, int64 [n] on the pool's device, hold `data`, [n, width], in host memory."""
        for tensor, first, column in self.pieces:
            columns = data[:, column : column + tensor.shape[1]]
            if len(self.pieces) == 1:
                tensor.index_copy_(0, block, columns.to(tensor.device))
                continue
            here = (block >= first) & (block < first + len(tensor))
            index = (block[here] - first).to(tensor.device)
            tensor.index_copy_(0, index, columns[here.to(data.device)].to(tensor.device))


class Segment:
    """The blocks first, ..., first + num_blocks - 1 of a pool: their KVs, in one storage or in one for each side.

    Attributes:
        first: the id of the first of them.
        fields: each field of the codec by name, [num_blocks, block_size, length], a view of a storage.
        storages: a block's bytes are theirs, one after the other.
    """

    def __init__(self, first: int, block_size: int, storages: Sequence[Storage]) -> None:
        self.first = first
        self.num_blocks = len(storages[0].data)
        self.storages = tuple(storages)
        self.fields: Mapping[str, Tensor] = {
            field.name: _view(storage.data, field, offset, block_size, getattr(torch, field.dtype))
            for storage in storages
            for field, offset in storage.form.fields
        }
        self.field_words = tuple(
            _view(storage.data, field, offset, block_size, widest_word(storage.form))
            for storage in storages
            for field, offset in storage.form.fields
        )

    def covers(self, block: Tensor) -> Tensor:
        """Which blocks are of this segment, bool of the same shape."""
        return (block >= self.first) & (block < self.first + self.num_blocks)

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks of this segment, int64 [n] each, on the device of the pool."""
        for storage in self.storages:
            words = storage.words
            at, to = (self._local(x, words) for x in (source, target))
            words[to] = words[at]

    def move(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Copy KVs between slots of this segment, given by block and offset, int64 [n] each."""
        for words in self.field_words:
            at, to = (
                (self._local(block, words), offset.to(words.device)) for block, offset in (source, target)
            )
            words[to] = words[at]

    def read(
        self, fields: Sequence[Field], index: tuple[Tensor, ...], device: torch.device
    ) -> dict[str, Tensor]:
        """What fields hold at an index into [num_blocks, block_size], by block ids of the pool; on `device`.

        Rows that lie elsewhere are packed there, and cross in one piece.
        """
        found = {}
        for field in fields:
            tensor = self.fields[field.name]
            found[field.name] = tensor[self._index(index, tensor)].to(device)
        return found

    def store(self, index: tuple[Tensor, ...], encoded: Mapping[str, Tensor]) -> None:
        """Let fields hold what is given for an index, as in `read`."""
        for name, values in encoded.items():
            tensor = self.fields[name]
            tensor[self._index(index, tensor)] = values.to(tensor.device, tensor.dtype)

    def _index(self, index: tuple[Tensor, ...], tensor: Tensor) -> tuple[Tensor, ...]:
        block, *offset = index
        return self._local(block, tensor), *(x.to(tensor.device) for x in offset)

    def _local(self, block: Tensor, tensor: Tensor) -> Tensor:
        """Where blocks lie in a tensor of this segment."""
        return (block - self.first if self.first else block).to(tensor.device)


def widest_word(form: BlockFormat) -> torch.dtype:
    """The widest integers that divide every field of a block."""
    sizes = [size for field, offset in form.fields for size in (offset, field.slot_bytes)]
    return next(word for word in _WORDS if all(n % word.itemsize == 0 for n in (form.nbytes, *sizes)))


def _view(data: Tensor, field: Field, offset: int, block_size: int, dtype: torch.dtype) -> Tensor:
    """The bytes of a field as [num_blocks, block_size, elements of `dtype`]."""
    return data.narrow(1, offset, block_size * field.slot_bytes).view(dtype).unflatten(1, (block_size, -1))


def joined_part(segments: Sequence[Segment]) -> BlockPart:
    """The KVs of all blocks, whose storages follow one another."""
    if len(segments) == 1:
        return BlockPart.of(segments[0].storages[0].words)
    pieces, width = [], 0
    for segment in segments:
        column = 0
        for storage in segment.storages:
            words = storage.data.view(torch.int64)
            pieces.append((words, segment.first, column))
            column += words.shape[1]
        width = column
    return BlockPart(tuple(pieces), width)
