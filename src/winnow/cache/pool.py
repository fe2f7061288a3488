"""The memory of the cache: every KV of every row, in blocks."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from winnow.cache.formats import Field
from winnow.cache.key_summaries import KeySummaries
from winnow.cache.layout import CacheLayout
from winnow.cache.memory import empty_in_large_pages
from winnow.cache.segment import BlockPart, Segment, Storage, joined_part
from winnow.cache.tier_traffic import TierTraffic
from winnow.cache.value_store import ValueStore


class KVPool:
    """One pool for all layers and heads of all sequences.

    Code outside `winnow.cache` and the attention backends reads and writes KVs by the methods below, which work for any
    codec and wherever values lie. They identify a slot by its flat number, block * block_size + offset.

    Attributes:
        first: the first block that the fields here hold; not 0 only in a view of `of_layer`.
        num_blocks: of the whole pool.
        storage: uint8 [num_blocks, bytes of a block's KVs], as `CacheLayout.block_format` describes it; of the blocks
            whose values lie on the device.
        fields: each field of the codec by name, [num_blocks, block_size, length], a view of `storage`: first those of a
            block's keys, then those of its values, so that a read is contiguous. Keys are rotated at their position.
        words: `storage` viewed as the widest integers that divide every field: [num_blocks, words of a block's KVs].
        fields_in_words: for each field, its offset in a block and its length in a slot, in words.
        position: int32 [num_blocks, block_size], the token's index in its sequence.
        accumulators: float32 [num_accumulators, num_blocks, block_size], what attention added up for each KV.
        values_apart: the values of blocks `num_blocks - num_far_blocks` and up; None: all lie in `storage`.
        summaries: of the keys of these blocks, where they lie apart too; None: they do not.

    Memory is uninitialised: a slot is written before the length of its row covers it.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        num_far_blocks: int = 0,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_near, form = num_blocks - num_far_blocks, layout.block_format
        data = empty_in_large_pages((num_near, form.nbytes), torch.uint8, device)
        self._segments: tuple[Segment, ...] = (Segment(0, layout.block_size, [Storage(data, form)]),)
        self.values_apart: ValueStore | None = None
        self.summaries: KeySummaries | None = None
        if layout.value_tier is not None:
            self.values_apart = ValueStore(layout, num_far_blocks, device)
            if layout.value_tier.keys:
                self.summaries = KeySummaries(layout, num_far_blocks, device)
                storages = [Storage(self.values_apart.data, form)]
            else:
                keys = empty_in_large_pages((num_far_blocks, layout.key_format.nbytes), torch.uint8, device)
                storages = [
                    Storage(keys, layout.key_format),
                    Storage(self.values_apart.data, layout.value_format),
                ]
            self._segments += (Segment(num_near, layout.block_size, storages),)
        self._views: tuple[KVPool, ...] = ()
        slots = (num_blocks, layout.block_size)
        self.position = empty_in_large_pages(slots, torch.int32, device)
        self.accumulators = empty_in_large_pages((layout.num_accumulators, *slots), torch.float32, device)

    # -- where it lies -------------------------------------------------------------------------------------------

    def of_layer(self, layer: int) -> "KVPool":
        """The pool as the rows of a layer see it: `fields` are those of their blocks, from `first` on."""
        if len(self._segments) == 1:
            return self
        return self.views[self.layout.is_far(layer)]

    @property
    def views(self) -> "tuple[KVPool, ...]":
        """The pool as the rows of layers see it whose values lie on the device, and where others lie apart, as those
        see it; always the same objects."""
        if len(self._segments) > 1 and not self._views:
            self._views = tuple(map(self._view, self._segments))
        return self._views or (self,)

    def _view(self, segment: Segment) -> "KVPool":
        view = copy(self)
        view._segments, view._views = (segment,), ()
        return view

    def covers(self, block: Tensor) -> Tensor:
        """Whether `fields` hold blocks, int64 [...]."""
        return self._segments[0].covers(block)

    @property
    def first(self) -> int:
        return self._segments[0].first

    @property
    def storage(self) -> Tensor:
        return self._segments[0].storages[0].data

    @property
    def fields(self) -> Mapping[str, Tensor]:
        return self._segments[0].fields

    @property
    def words(self) -> Tensor:
        return self._segments[0].storages[0].words

    @property
    def fields_in_words(self) -> tuple[tuple[int, int], ...]:
        size = self.words.itemsize
        form = self._segments[0].storages[0].form
        return tuple((offset // size, field.slot_bytes // size) for field, offset in form.fields)

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
        return self.position.device

    @property
    def nbytes(self) -> int:
        """On the device."""
        kvs = sum(storage.data.nbytes for segment in self._segments for storage in segment.storages)
        apart = 0 if self.values_apart is None else self.values_apart.nbytes
        summaries = 0 if self.summaries is None else self.summaries.nbytes
        return kvs - apart + summaries + self.position.nbytes + self.accumulators.nbytes

    @property
    def first_far(self) -> int:
        """The first block whose values lie apart."""
        return self.num_blocks - (0 if self.values_apart is None else len(self.values_apart.data))

    def moved(self, block: Tensor) -> None:
        """KVs were moved to blocks, int64 [n]: summaries of their keys no longer hold."""
        if self.summaries is not None:
            self.summaries.stale[block[block >= self.first_far] - self.first_far] = True

    @property
    def traffic(self) -> TierTraffic:
        """What goes to and from the values that lie apart."""
        assert self.values_apart is not None, "there is a tier"
        return self.values_apart.traffic

    def count_scored(self, num_rows: int) -> None:
        """A policy reads values that lie apart."""
        assert self.values_apart is not None, "there is a tier"
        nbytes = num_rows * self.values_apart.slot_bytes
        self.traffic.add(TierTraffic(rows_scored=num_rows, bytes_read=nbytes))

    @property
    def parts(self) -> tuple[BlockPart, ...]:
        """All that a block holds: KVs as `CacheLayout.block_format`, positions, and each of the accumulators."""
        numbers = (self.position, *self.accumulators)
        return joined_part(self._segments), *(BlockPart.of(each) for each in numbers)

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
        return self.layout.codec.keys(self._read(self._key_fields, self.place(slot)))

    def values(self, slot: Tensor) -> Tensor:
        """The values in slots, int64 [...]: float32 [..., d]."""
        return self.layout.codec.values(self._read(self._value_fields, self.place(slot)))

    def set_keys(self, slot: Tensor, k: Tensor) -> None:
        """Replace the keys in slots, int64 [...], by k, [..., d]; values, positions and accumulators stay."""
        self._store(self.place(slot), self.layout.codec.encode_keys(k))

    def set_block_keys(self, block: Tensor, k: Tensor) -> None:
        """Encode the keys of whole blocks, int64 [...], k [..., block_size, d], for codecs that do not by slots."""
        self._store((block,), self.layout.codec.encode_keys(k))

    def keys_of(self, block: Tensor) -> Tensor:
        """The keys in all slots of blocks, int64 [..., n]: float32 [..., n * block_size, d]; faster than by slots."""
        return self.layout.codec.keys(self._read(self._key_fields, (block,))).flatten(-3, -2)

    def values_of(self, block: Tensor) -> Tensor:
        """The values in all slots of blocks, int64 [..., n]: float32 [..., n * block_size, d]."""
        return self.layout.codec.values(self._read(self._value_fields, (block,))).flatten(-3, -2)

    def positions_of(self, block: Tensor) -> Tensor:
        """The positions in all slots of blocks, int64 [..., n]: int32 [..., n * block_size]."""
        return _of_blocks(self.position, block)

    # -- accumulators --------------------------------------------------------------------------------------------

    def accumulated(self, block: Tensor) -> Tensor:
        """The accumulators of all slots of blocks, int64 [..., n]: float32 [num_accumulators, ..., n * block_size]."""
        return _of_blocks(self.accumulators, block)

    def set_accumulator(self, slot: Tensor, score: Tensor) -> None:
        """Set accumulator 0 of slots, int64 [...], to scores, float32 [...]."""
        self.accumulators.flatten(1)[0, slot] = score

    def clear_accumulators(self, slot: Tensor, count: int) -> None:
        """Set the first `count` accumulators of slots, int64 [...], to 0."""
        self.accumulators.flatten(1)[:count, slot] = 0.0

    # -- moving --------------------------------------------------------------------------------------------------

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks, int32 [n] each, to others of their kind. No target may also be a source."""
        for segment, mask in self._split(source):
            segment.copy_blocks(source[mask], target[mask])
        self.moved(target.long())
        self.position[target] = self.position[source]
        self.accumulators[:, target] = self.accumulators[:, source]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KVs from slots to slots with positions and accumulators, int64 [n] each; no slot is in both.

        Fields are copied byte by byte, so a KV is the same afterwards whatever the codec. A KV stays in its row.
        """
        source_place, target_place = self.place(source), self.place(target)
        for segment, mask in self._split(source_place[0]):
            segment.move(
                (source_place[0][mask], source_place[1][mask]), (target_place[0][mask], target_place[1][mask])
            )
        self.position[target_place] = self.position[source_place]
        self.accumulators[:, *target_place] = self.accumulators[:, *source_place]

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _key_fields(self) -> tuple[Field, ...]:
        return self.layout.codec.key_fields(self.layout.head_dim)

    @property
    def _value_fields(self) -> tuple[Field, ...]:
        return self.layout.codec.value_fields(self.layout.head_dim)

    def _split(self, block: Tensor) -> Iterator[tuple[Segment, Tensor | slice]]:
        """The segments that hold some of `block`, int64 [n], and which."""
        if len(self._segments) == 1:
            yield self._segments[0], slice(None)
            return
        for segment in self._segments:
            mask = segment.covers(block)
            if bool(mask.any()):
                yield segment, mask

    def _read(self, fields: Sequence[Field], index: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What fields hold at an index into [num_blocks, block_size] or [num_blocks]."""
        [(segment, _), *others] = split = list(self._split(index[0])) or [(self._segments[0], slice(None))]
        if not others:
            return segment.read(fields, index, self.device)
        found: dict[str, Tensor] = {}
        for segment, mask in split:
            for name, part in segment.read(fields, tuple(x[mask] for x in index), self.device).items():
                if name not in found:
                    found[name] = part.new_empty((*index[0].shape, *part.shape[1:]))
                found[name][mask] = part
        return found

    def _store(self, index: tuple[Tensor, ...], encoded: Mapping[str, Tensor]) -> None:
        [(segment, _), *others] = split = list(self._split(index[0])) or [(self._segments[0], slice(None))]
        if not others:
            segment.store(index, encoded)
            return
        for segment, mask in split:
            segment.store(tuple(x[mask] for x in index), {name: x[mask] for name, x in encoded.items()})


def _of_blocks(each: Tensor, block: Tensor) -> Tensor:
    """What tensors of [..., num_blocks, size] hold for blocks, int64 [*, n]: [..., *, n * size]."""
    # Copies whole blocks, where indexing would look up each number.
    found = each.index_select(-2, block.flatten())
    return found.view(*each.shape[:-2], *block.shape[:-1], -1)
