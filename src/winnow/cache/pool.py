"""Memory of the cache: the KVs of all rows, in blocks."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from winnow.cache.block_bytes import BlockPart, SlotNumbers, Storage, widest_word
from winnow.cache.codec import BIAS
from winnow.cache.formats import Field
from winnow.cache.layout import CacheLayout
from winnow.cache.memory import empty_in_large_pages
from winnow.cache.row_groups import BlockCount, BlockKind
from winnow.cache.tiers.copies_in_flight import CopiesInFlight
from winnow.cache.tiers.value_store import ValueStore
from winnow.values.tier_traffic import TierTraffic


class KindPool:
    """Blocks first to first + num_blocks - 1 of a pool, which are of one kind.

    All blocks in the tables of a layer's rows lie here. Slots are numbered as in the whole pool, by block * block_size
    + offset. A table entry past the end of a row may name a block of another kind; one of this kind is read instead.

    Attributes:
        numbers: positions and accumulators, those of the whole pool.
        storages: uint8 [num_blocks, bytes of a block's KVs], as `BlockKind.form` describes it; where values lie on a
            tier, two.
        fields: each field of the codec by name, [num_blocks, block_size, length], a view of a storage: first those of a
            block's keys, then those of its values, so that a read is contiguous. Keys are rotated at their position.
        tier: the values that lie on a tier; None: all lie on the device.
        copies: copies to the tier that are under way; None: the device writes to the tier directly, as a CPU does.
    """

    def __init__(
        self, kind: BlockKind, first: int, num_blocks: int, numbers: SlotNumbers, *, alone: bool = True
    ) -> None:
        self.kind, self.first, self.num_blocks, self.numbers = kind, first, num_blocks, numbers
        self._alone, device = alone, numbers.device
        self.tier = None if kind.tier is None else ValueStore(kind, num_blocks, device)
        if self.tier is None:
            data = empty_in_large_pages((num_blocks, kind.form.nbytes), torch.uint8, device)
            self.storages: tuple[Storage, ...] = (Storage(data, kind.form),)
        else:
            keys = empty_in_large_pages((num_blocks, kind.key_form.nbytes), torch.uint8, device)
            self.storages = Storage(keys, kind.key_form), Storage(self.tier.data, kind.value_form)
        placed = [(storage, *field) for storage in self.storages for field in storage.form.fields]
        self.fields: Mapping[str, Tensor] = {
            field.name: storage.view(field, offset, kind.size, getattr(torch, field.dtype))
            for storage, field, offset in placed
        }
        self.copies: CopiesInFlight | None = None
        if self.tier is not None and device.type == "cuda":
            self.copies = CopiesInFlight(self.tier_fields, device)
        self._field_words = [
            storage.view(field, offset, kind.size, widest_word(storage.form))
            for storage, field, offset in placed
        ]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of the device, positions and accumulators not counted."""
        kvs = sum(storage.data.nbytes for storage in self.storages)
        return kvs - (0 if self.tier is None else self.tier.nbytes)

    @property
    def tier_fields(self) -> dict[str, Tensor]:
        form = self.storages[-1].form
        return {} if self.tier is None else {field.name: self.fields[field.name] for field, _ in form.fields}

    @property
    def storage(self) -> Tensor:
        [storage] = self.storages
        return storage.data

    @property
    def words(self) -> Tensor:
        """`storage` viewed as the widest integers that divide every field: [num_blocks, words of a block's KVs]."""
        return self.storages[0].words

    @property
    def fields_in_words(self) -> tuple[tuple[int, int], ...]:
        """For each field, its offset in a block and its length in a slot, in words."""
        size, fields = self.words.itemsize, self.storages[0].form.fields
        return tuple((offset // size, field.slot_bytes // size) for field, offset in fields)

    @property
    def k(self) -> Tensor:
        return self.fields["k"]

    @property
    def v(self) -> Tensor:
        return self.fields["v"]

    @property
    def parts(self) -> tuple[BlockPart, ...]:
        """Contents of a block in parts: KVs as `BlockKind.form`, positions, and each accumulator."""
        self._wait_for_copies()
        numbers = (self.numbers.position, *self.numbers.accumulators)
        own = (BlockPart((each.narrow(0, self.first, self.num_blocks),)) for each in numbers)
        return BlockPart.of(self.storages), *own

    def covers(self, block: Tensor) -> Tensor:
        return (block >= self.first) & (block < self.first + self.num_blocks)

    def local(self, block: Tensor) -> Tensor:
        """Return the indices of blocks in this kind's tensors, counted from its first block."""
        if self._alone:
            return block
        return (block - self.first).clamp_(0, self.num_blocks - 1)

    # -- KVs -----------------------------------------------------------------------------------------------------
    # Slots are int64 [...], blocks int64 [..., n]. What they hold comes as float32: keys, rotated at their positions,
    # and values [..., d], biases [...]; of whole blocks [..., n * block_size, d] and [..., n * block_size].

    def write(self, slot: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Store new KVs, whose accumulators start at 0.

        Args:
            slot: int64 [...], distinct; k, v: [..., d], of any floating-point dtype; position: [...].
        """
        place = self.numbers.place(slot)
        self._store(place, self.kind.codec.encode(k, v))
        self.numbers.position[place] = position.to(torch.int32)
        self.numbers.accumulators[:, *place] = 0.0

    def keys(self, slot: Tensor) -> Tensor:
        return self.kind.codec.keys(self._read(self.kind.key_fields, self.numbers.place(slot)))

    def values(self, slot: Tensor) -> Tensor:
        return self.kind.codec.values(self._read(self.kind.value_fields, self.numbers.place(slot)))

    def keys_of(self, block: Tensor) -> Tensor:
        return self.kind.codec.keys(self._read(self.kind.key_fields, (block,))).flatten(-3, -2)

    def values_of(self, block: Tensor) -> Tensor:
        return self.kind.codec.values(self._read(self.kind.value_fields, (block,))).flatten(-3, -2)

    @property
    def has_bias(self) -> bool:
        return BIAS.name in self.fields

    def biases(self, slot: Tensor) -> Tensor:
        return self._read((BIAS,), self.numbers.place(slot))[BIAS.name][..., 0].float()

    def biases_of(self, block: Tensor) -> Tensor:
        return self._read((BIAS,), (block,))[BIAS.name].flatten(-3).float()

    def copy_turned(self, source: Tensor, target: Tensor, k: Tensor, position: Tensor) -> None:
        """Copy values between slots, int64 [...], none in both, and put keys k, [..., d], at positions [...] beside."""
        place = self.numbers.place(target)
        self._store(place, self.kind.codec.encode_keys(k))
        self._store(
            place,
            self._read(
                (*self.kind.value_fields, *self.kind.codec.further_fields), self.numbers.place(source)
            ),
        )
        self.numbers.position[place] = position.to(torch.int32).expand_as(target)
        self.numbers.accumulators[:, *place] = 0.0

    def set_fitted(self, slot: Tensor, v: Tensor, bias: Tensor) -> None:
        """Replace values and biases in slots, int64 [...], by v, [..., d], and bias, [...]; keys and numbers stay."""
        encoded = self.kind.codec.encode_values(v) | {BIAS.name: bias[..., None]}
        self._store(self.numbers.place(slot), encoded)

    # -- tiers ---------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> TierTraffic:
        assert self.tier is not None, "there is a tier"
        return self.tier.traffic

    def count_scored(self, num_rows: int) -> None:
        if self.tier is not None:
            nbytes = num_rows * self.tier.slot_bytes
            self.traffic.add(TierTraffic(rows_scored=num_rows, bytes_read=nbytes))

    def _wait_for_copies(self) -> None:
        if self.copies is not None:
            self.traffic.seconds_waited += self.copies.wait()

    # -- moving --------------------------------------------------------------------------------------------------

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        self._wait_for_copies()
        for storage in self.storages:
            words = storage.words
            words[self._index((target,), words)] = words[self._index((source,), words)]

    def move(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Copy KVs between slots of this kind, given by block and offset, int64 [n] each."""
        self._wait_for_copies()
        for words in self._field_words:
            words[self._index(target, words)] = words[self._index(source, words)]

    # -- inside --------------------------------------------------------------------------------------------------

    def _read(self, fields: Sequence[Field], index: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return what fields hold at an index into [num_blocks, block_size] or [num_blocks], by block ids of the pool.

        Rows that lie elsewhere are packed there, and cross in one piece.
        """
        found = {}
        for field in fields:
            tensor = self.fields[field.name]
            if self.copies is not None and field.name in self.copies.fields:
                found[field.name] = self.copies.read(field.name, (self.local(index[0]), *index[1:]))
                continue
            found[field.name] = tensor[self._index(index, tensor)].to(self.device)
        return found

    def _store(self, index: tuple[Tensor, ...], encoded: Mapping[str, Tensor]) -> None:
        if self.copies is not None:
            block, offset = index
            self.traffic.seconds_waited += self.copies.write(self.local(block), offset, encoded)
        for name, values in encoded.items():
            if self.copies is not None and name in self.copies.fields:
                continue
            tensor = self.fields[name]
            tensor[self._index(index, tensor)] = values.to(tensor.device, tensor.dtype)

    def _index(self, index: tuple[Tensor, ...], tensor: Tensor) -> tuple[Tensor, ...]:
        block, *offset = index
        return self.local(block).to(tensor.device), *(x.to(tensor.device) for x in offset)


class KVPool:
    """Blocks of all layers, heads and sequences.

    Outside `winnow.cache` and the attention backends vectors are read and written through `of_layer`, whose methods
    work for any codec and tier, and KVs are moved by the methods here.

    Memory is uninitialised: a slot is written before the length of its row covers it.

    Args:
        count: blocks of each kind, in the order of `CacheLayout.kinds`, or of the only one.
    """

    def __init__(
        self, layout: CacheLayout, count: BlockCount | int, device: torch.device | str = "cpu"
    ) -> None:
        count = BlockCount((count,)) if isinstance(count, int) else count
        self.layout, self.num_blocks = layout, count.total
        self.numbers = SlotNumbers(count.total, layout.block_size, layout.num_accumulators, device)
        kinds, first = [], 0
        for kind, number in zip(layout.kinds, count, strict=True):
            kinds.append(KindPool(kind, first, number, self.numbers, alone=len(layout.kinds) == 1))
            first += number
        self.kinds = tuple(kinds)
        self._by_layer = tuple(self.kinds[kind] for kind in layout.kind_of[:, 0].tolist())

    def of_layer(self, layer: int) -> KindPool:
        return self._by_layer[layer]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def position(self) -> Tensor:
        return self.numbers.position

    @property
    def accumulators(self) -> Tensor:
        return self.numbers.accumulators

    @property
    def nbytes(self) -> int:
        return sum(kind.nbytes for kind in self.kinds) + self.numbers.nbytes

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        for kind, mask in self.split(source):
            kind.copy_blocks(source[mask], target[mask])
        self.numbers.copy_blocks(source, target)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KVs from slots to slots with positions and accumulators, int64 [n] each; no slot is in both.

        Fields are copied byte by byte, so a KV is the same afterwards whatever the codec. A KV stays in its row.
        """
        (block, offset), (to_block, to_offset) = self.numbers.place(source), self.numbers.place(target)
        for kind, mask in self.split(block):
            kind.move((block[mask], offset[mask]), (to_block[mask], to_offset[mask]))
        self.numbers.move((block, offset), (to_block, to_offset))

    def split(self, block: Tensor) -> Iterator[tuple[KindPool, Tensor | slice]]:
        """Return the kinds that hold some of `block`, int64 [n], and which."""
        if len(self.kinds) == 1:
            yield self.kinds[0], slice(None)
            return
        for kind in self.kinds:
            mask = kind.covers(block)
            if bool(mask.any()):
                yield kind, mask
