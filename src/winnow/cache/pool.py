"""The memory of the cache: every KV of every row, in blocks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from winnow.cache.formats import Field
from winnow.cache.layout import CacheLayout
from winnow.cache.memory import empty_in_large_pages

# Integers as which bytes are copied, the widest first.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class KVPool:
    """One pool for all layers and heads of all sequences.

    Code outside `winnow.cache` and the attention backends reads and writes KVs by the methods below, which work for any
    codec. They identify a slot by its flat number, block * block_size + offset.

    Attributes:
        storage: uint8 [num_blocks, bytes of a block's KVs], as `CacheLayout.block_format` describes it.
        fields: each field of the codec by name, [num_blocks, block_size, length], a view of `storage`: first those of a
            block's keys, then those of its values, so that a read is contiguous. Keys are rotated at their position.
        words: `storage` viewed as the widest integers that divide every field: [num_blocks, words of a block's KVs].
        fields_in_words: for each field, its offset in a block and its length in a slot, in words.
        position: int32 [num_blocks, block_size], the token's index in its sequence.
        accumulators: float32 [num_accumulators, num_blocks, block_size], what attention added up for each KV.

    Memory is uninitialised: a slot is written before the length of its row covers it.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        slots, form = (num_blocks, layout.block_size), layout.block_format
        self.storage = empty_in_large_pages((num_blocks, form.nbytes), torch.uint8, device)
        self.fields: Mapping[str, Tensor] = {
            field.name: self._view(field, offset, getattr(torch, field.dtype))
            for field, offset in form.fields
        }
        self.position = empty_in_large_pages(slots, torch.int32, device)
        self.accumulators = empty_in_large_pages((layout.num_accumulators, *slots), torch.float32, device)
        sizes = [size for field, offset in form.fields for size in (offset, field.slot_bytes)]
        word = next(word for word in _WORDS if all(n % word.itemsize == 0 for n in (form.nbytes, *sizes)))
        self.words = self.storage.view(word)
        self.fields_in_words = tuple(
            (offset // word.itemsize, field.slot_bytes // word.itemsize) for field, offset in form.fields
        )
        self._field_words = tuple(self._view(field, offset, word) for field, offset in form.fields)

    @property
    def k(self) -> Tensor:
        """The field of that name; KeyError: the codec has none."""
        return self.fields["k"]

    @property
    def v(self) -> Tensor:
        """The field of that name; KeyError: the codec has none."""
        return self.fields["v"]

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes + self.position.nbytes + self.accumulators.nbytes

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that a block holds, each [num_blocks, n]: KVs as `words`, positions, and each of the accumulators."""
        return (self.words, self.position, *self.accumulators)

    # -- slots ---------------------------------------------------------------------------------------------------

    def place(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Convert flat slot numbers to an index into tensors of [num_blocks, block_size, ...]."""
        return slot // self.layout.block_size, slot % self.layout.block_size

    def slots_of(self, block: Tensor) -> Tensor:
        """The flat numbers of all slots of blocks, int64 [..., n]: int64 [..., n * block_size]."""
        offset = torch.arange(self.layout.block_size, device=block.device)
        return (block[..., None] * self.layout.block_size + offset).flatten(-2)

    # -- KVs -----------------------------------------------------------------------------------------------------

    def write(self, slot: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Store new KVs, whose accumulators start at 0.

        Args:
            slot: int64 [...], distinct; k, v: [..., d], of any floating-point dtype; position: [...].
        """
        place = self.place(slot)
        self._store(place, self.layout.codec.encode(k, v))
        self.position[place] = position.to(torch.int32)
        self.accumulators[:, *place] = 0.0

    def keys(self, slot: Tensor) -> Tensor:
        """The keys in slots, int64 [...], rotated at their positions: float32 [..., d]."""
        return self.layout.codec.keys(self._at(self._key_fields, self.place(slot)))

    def values(self, slot: Tensor) -> Tensor:
        """The values in slots, int64 [...]: float32 [..., d]."""
        return self.layout.codec.values(self._at(self._value_fields, self.place(slot)))

    def set_keys(self, slot: Tensor, k: Tensor) -> None:
        """Replace the keys in slots, int64 [...], by k, [..., d]; values, positions and accumulators stay."""
        self._store(self.place(slot), self.layout.codec.encode_keys(k))

    def set_block_keys(self, block: Tensor, k: Tensor) -> None:
        """Encode the keys of whole blocks, int64 [...], k [..., block_size, d], for codecs that do not by slots."""
        self._store((block,), self.layout.codec.encode_keys(k))

    def keys_of(self, block: Tensor) -> Tensor:
        """The keys in all slots of blocks, int64 [..., n]: float32 [..., n * block_size, d]; faster than by slots."""
        return self.layout.codec.keys(self._at(self._key_fields, (block,))).flatten(-3, -2)

    def values_of(self, block: Tensor) -> Tensor:
        """The values in all slots of blocks, int64 [..., n]: float32 [..., n * block_size, d]."""
        return self.layout.codec.values(self._at(self._value_fields, (block,))).flatten(-3, -2)

    def positions_of(self, block: Tensor) -> Tensor:
        """The positions in all slots of blocks, int64 [..., n]: int32 [..., n * block_size]."""
        return _of_blocks(self.position, block)

    # -- accumulators --------------------------------------------------------------------------------------------

    def accumulated(self, block: Tensor) -> Tensor:
        """The accumulators of all slots of blocks, int64 [..., n]: float32 [num_accumulators, ..., n * block_size]."""
        return _of_blocks(self.accumulators, block)

    def clear_accumulators(self, slot: Tensor, count: int) -> None:
        """Set the first `count` accumulators of slots, int64 [...], to 0."""
        self.accumulators.flatten(1)[:count, slot] = 0.0

    # -- moving --------------------------------------------------------------------------------------------------

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, int32 [n] each. No target may also be a source."""
        for part in (self.words, self.position):
            part[target] = part[source]
        self.accumulators[:, target] = self.accumulators[:, source]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KVs from slots to slots with positions and accumulators, int64 [n] each; no slot is in both.

        Fields are copied byte by byte, so a KV is the same afterwards whatever the codec.
        """
        source_place, target_place = self.place(source), self.place(target)
        for part in (*self._field_words, self.position):
            part[target_place] = part[source_place]
        self.accumulators[:, *target_place] = self.accumulators[:, *source_place]

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _key_fields(self) -> tuple[Field, ...]:
        return self.layout.codec.key_fields(self.layout.head_dim)

    @property
    def _value_fields(self) -> tuple[Field, ...]:
        return self.layout.codec.value_fields(self.layout.head_dim)

    def _view(self, field: Field, offset: int, dtype: torch.dtype) -> Tensor:
        """The bytes of a field as [num_blocks, block_size, elements of `dtype`]."""
        size = self.layout.block_size
        return self.storage.narrow(1, offset, size * field.slot_bytes).view(dtype).unflatten(1, (size, -1))

    def _at(self, fields: Iterable[Field], index: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {field.name: self.fields[field.name][index] for field in fields}

    def _store(self, place: tuple[Tensor, ...], encoded: Mapping[str, Tensor]) -> None:
        for name, values in encoded.items():
            field = self.fields[name]
            field[place] = values.to(field.dtype)


def _of_blocks(each: Tensor, block: Tensor) -> Tensor:
    """What tensors of [..., num_blocks, size] hold for blocks, int64 [*, n]: [..., *, n * size]."""
    # Copies whole blocks, where indexing would look up each number.
    found = each.index_select(-2, block.flatten())
    return found.view(*each.shape[:-2], *block.shape[:-1], -1)
