"""Groups of layers whose rows are alike, and kinds of their blocks. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from winnow.cache.codec import BlockFormat, PairCodec
from winnow.cache.formats import Field
from winnow.values.value_tier import ValueTier

_INT32 = 4
_FLOAT32 = 4


class BlockCount(tuple[int, ...]):
    """Numbers of blocks by kind, in the order of `CacheLayout.kinds`; missing ones are 0."""

    __slots__ = ()

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: "Iterable[int]") -> "BlockCount":
        return BlockCount(a + b for a, b in zip_longest(self, other, fillvalue=0))

    def minus(self, other: "Iterable[int]") -> "BlockCount":
        return BlockCount(a - b for a, b in zip_longest(self, other, fillvalue=0))

    def fits(self, room: "Iterable[int]") -> bool:
        return all(a <= b for a, b in zip_longest(self, room, fillvalue=0))


@dataclass(frozen=True)
class BlockKind:
    """Content of a block. Blocks of one kind come from one stack, and any row of that kind may take them."""

    size: int  # slots
    key_size: int
    value_size: int
    codec: PairCodec
    tier: ValueTier | None = None
    values_in_keys: bool = False
    rank: int = 0  # the one of several that holds it (`CacheLayout.ranks`)

    @cached_property
    def form(self) -> BlockFormat:
        if self.values_in_keys:
            return BlockFormat.of(self.key_fields, self.size).with_values(self.value_fields)
        if self.tier is None:
            return BlockFormat.of(self.key_fields + self.value_fields + self.codec.further_fields, self.size)
        return BlockFormat.of_sides(self.key_form, self.value_form)

    @cached_property
    def key_form(self) -> BlockFormat:
        # In whole words of 8 bytes, so that any field may follow, and blocks are copied as words.
        return BlockFormat.of(self.key_fields, self.size, align=8)

    @cached_property
    def value_form(self) -> BlockFormat:
        return BlockFormat.of(self.value_fields, self.size, align=8)

    @cached_property
    def key_fields(self) -> tuple[Field, ...]:
        return self.codec.key_fields(self.key_size)

    @cached_property
    def value_fields(self) -> tuple[Field, ...]:
        return self.codec.value_fields(self.value_size)

    @property
    def slot_bytes(self) -> int:
        values = () if self.values_in_keys else self.value_fields
        return sum(field.slot_bytes for field in self.key_fields + values + self.codec.further_fields)

    @property
    def tier_slot_bytes(self) -> int:
        return 0 if self.tier is None else sum(field.slot_bytes for field in self.value_fields)

    @property
    def tier_bytes(self) -> int:
        return 0 if self.tier is None else self.value_form.nbytes

    def part_bytes(self, num_accumulators: int) -> tuple[int, ...]:
        """Return bytes of one block's KVs, of its positions, and of each of its accumulators."""
        return self.form.nbytes, self.size * _INT32, *[self.size * _FLOAT32] * num_accumulators

    def device_bytes(self, num_accumulators: int) -> int:
        return sum(self.part_bytes(num_accumulators)) - self.tier_bytes


@dataclass(frozen=True)
class RowGroup:
    """Layers whose rows are alike.

    Attributes:
        layers: their numbers, ascending.
        num_kv_heads: rows of each of them in a sequence.
        key_size, value_size: numbers in a key and in a value.
        window: sliding window of attention; None: a layer sees everything.
        tier: where values lie; None: on the device, beside their keys.
        values_in_keys: a key is stored once, and read as its value too, of which a part may count.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_size: int
    value_size: int
    codec: PairCodec
    window: int | None = None
    tier: ValueTier | None = None
    values_in_keys: bool = False

    def kind(self, block_size: int) -> BlockKind:
        return BlockKind(
            block_size, self.key_size, self.value_size, self.codec, self.tier, self.values_in_keys
        )
