"""Codec of a KV: the fields of a slot, their bytes, and the way from vectors to fields and back.

What a codec says of itself is host arithmetic, which the ledger and the planner need: this module imports no torch.

A block of KVs is `BlockFormat.nbytes` bytes of `KVPool.storage`. Its fields lie one after the other, those of keys
first; a field is `block_size` slots of `length` elements side by side, from a byte offset that is a multiple of its
element. `winnow.cache.formats` lists the fields of a side. So with blocks of 16 slots, head_dim 64 and k=int8,v=int4 a
block is 1,696 bytes:

    k        int8  [16][64]   from byte    0
    k_scale  f16   [16][1]    from byte 1024     one group a head
    v        uint8 [16][32]   from byte 1056     two groups: bytes 0-15 of a slot hold channels 0-31
    v_scale  f16   [16][2]    from byte 1568
    v_min    f16   [16][2]    from byte 1632     ends at byte 1696

With a bias (`PairCodec.bias`) a last field follows: bias f16[16][1].
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from winnow.cache.formats import Field, PlainFormat, VectorFormat, make_format
from winnow.errors import ConfigError
from winnow.values.kv_dtype import NARROW_BITS, PLAIN_FORMATS, KVDtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# The field that attention adds to a KV's logits, and the suffix of the names of codecs that have it.
BIAS = Field("bias", "float16", 1)
WITH_BIAS = "+bias"


class PlacedField(NamedTuple):
    """Place of a field in a block: `block_size` slots of it side by side, from byte `offset` on."""

    field: Field
    offset: int


@dataclass(frozen=True)
class BlockFormat:
    """A block of KVs, `nbytes` before the next one: its fields in order, each aligned to its elements."""

    fields: tuple[PlacedField, ...]
    nbytes: int

    @classmethod
    def of(cls, fields: tuple[Field, ...], block_size: int, align: int = 1) -> "BlockFormat":
        placed, end = [], 0
        for field in fields:
            offset = round_up(end, field.item_bytes)
            placed.append(PlacedField(field, offset))
            end = offset + block_size * field.slot_bytes
        return cls(tuple(placed), round_up(end, max(align, *(field.item_bytes for field in fields))))

    @classmethod
    def of_sides(cls, keys: "BlockFormat", values: "BlockFormat") -> "BlockFormat":
        """Return a block's keys, padded, and its values behind them, each as where they are stored separately."""
        moved = [PlacedField(field, keys.nbytes + offset) for field, offset in values.fields]
        return cls((*keys.fields, *moved), keys.nbytes + values.nbytes)

    def with_values(self, values: tuple[Field, ...]) -> "BlockFormat":
        """Return the same, with these fields in the places of those that there are."""
        placed = zip(values, self.fields, strict=True)
        return replace(self, fields=(*self.fields, *(PlacedField(v, k.offset) for v, k in placed)))


@dataclass(frozen=True)
class PairCodec:
    """Codec of a token's key and value in a slot: keys in one format and values in another.

    Everything needed to decode one KV lies in its slot (scales too), so a KV moves by copying its fields.

    Where a side is rotated, what is stored is its Hadamard transform in blocks of `rotation_block` channels: it spreads
    what few channels hold over all of them, so that no group has a much wider range than another. The transform is
    orthonormal and its own inverse, so a kernel may read stored keys by rotated queries (q . k = Hq . Hk), and rotate
    what it sums of stored values. `keys` and `values` here undo it.

    With `bias` a KV has a number that attention adds to its logits, so that it can stand for others
    (`winnow.eviction.Fit`).
    """

    key: VectorFormat
    value: VectorFormat
    rotate_keys: bool = False
    rotate_values: bool = False
    # Prefixes that were saved before there was one hold the `repr` of their codec.
    bias: bool = dataclasses.field(default=False, repr=False)

    @property
    def name(self) -> str:
        return str(KVDtype(self.key.name, self.value.name)) + WITH_BIAS * self.bias

    @property
    def further_fields(self) -> tuple[Field, ...]:
        """Fields that are of no side, behind those of values in a block; they start at 0."""
        return (BIAS,) if self.bias else ()

    def key_fields(self, head_dim: int) -> tuple[Field, ...]:
        """Return the fields that store a key, in the order in which a block holds them."""
        if (self.rotate_keys or self.rotate_values) and rotation_block(head_dim) == 1:
            raise ConfigError(f"kv_rotate needs an even head_dim, the model's is {head_dim}: give none")
        return self.key.fields("k", head_dim)

    def value_fields(self, head_dim: int) -> tuple[Field, ...]:
        return self.value.fields("v", head_dim)

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        return self.key_fields(head_dim) + self.value_fields(head_dim) + self.further_fields

    def encode(self, k: "Tensor", v: "Tensor") -> "dict[str, Tensor]":
        """Encode KVs, [..., d] each: all fields, [..., length] each, not yet rounded to their dtypes."""
        further = {each.name: k.new_zeros((*k.shape[:-1], each.length)) for each in self.further_fields}
        return self.encode_keys(k) | self.encode_values(v) | further

    def encode_keys(self, k: "Tensor") -> "dict[str, Tensor]":
        return _encode("k", self.key, k, self.rotate_keys)

    def encode_values(self, v: "Tensor") -> "dict[str, Tensor]":
        return _encode("v", self.value, v, self.rotate_values)

    def keys(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        """Decode keys from `key_fields`, [..., length] each: float32 [..., d], which may share memory with them."""
        return _decode("k", self.key, fields, self.rotate_keys)

    def values(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        return _decode("v", self.value, fields, self.rotate_values)


def _encode(side: str, form: VectorFormat, x: "Tensor", rotate: bool) -> "dict[str, Tensor]":
    encoded = form.encode(turned(x) if rotate else x)
    return {f"{side}{suffix}": each for suffix, each in zip(form.suffixes, encoded, strict=True)}


def _decode(side: str, form: VectorFormat, fields: "Mapping[str, Tensor]", rotate: bool) -> "Tensor":
    x = form.decode(*(fields[f"{side}{suffix}"] for suffix in form.suffixes))
    return turned(x) if rotate else x


def turned(x: "Tensor") -> "Tensor":
    """Return the Hadamard transform of vectors, [..., d], as float32."""
    from winnow.cache.packing import hadamard

    return hadamard(x, rotation_block(x.shape[-1]))


@dataclass(frozen=True)
class PlainCodec(PairCodec):
    """Vectors rounded to one floating-point format: `k dtype[d], v dtype[d]`."""

    def __init__(self, dtype: str, bias: bool = False) -> None:
        super().__init__(PlainFormat(dtype), PlainFormat(dtype), bias=bias)

    @property
    def dtype(self) -> str:
        return self.key.name


def rotation_block(head_dim: int) -> int:
    """Return channels that the Hadamard transform mixes: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


CODECS: Mapping[str, PairCodec] = {name: PlainCodec(name) for name in PLAIN_FORMATS}
"""The codecs of plain vectors by name."""


def make_codec(
    kind: KVDtype, group: int | None = None, rotate: str = "auto", bias: bool = False
) -> PairCodec:
    """Return the codec of two formats, neither of them `auto`.

    Args:
        group: channels that share a scale; None: a head at 8 bits, else the most up to 32 that divide it.
        rotate: which sides are rotated, one of `winnow.values.kv_dtype.ROTATIONS`; "auto": keys of 4 bits and below.
    """
    if kind.k == kind.v and kind.k in CODECS:
        return PlainCodec(kind.k, bias) if bias else CODECS[kind.k]
    rotates_keys = kind.k in NARROW_BITS if rotate == "auto" else "k" in rotate
    return PairCodec(
        make_format(kind.k, group),
        make_format(kind.v, group),
        rotates_keys and kind.k not in PLAIN_FORMATS,
        "v" in rotate and kind.v not in PLAIN_FORMATS,
        bias,
    )


def codec_of(kind: "PairCodec | str | torch.dtype") -> PairCodec:
    """Return the codec of that name, as `kv_cache_dtype` has it; a torch dtype stands for vectors stored in it.

    With `WITH_BIAS` behind the name each KV has a bias. Raises ConfigError: no codec has that name.
    """
    if isinstance(kind, PairCodec):
        return kind
    name = str(kind).removeprefix("torch.")
    parsed = KVDtype.parse(name.removesuffix(WITH_BIAS), "KV format")
    if "auto" in (parsed.k, parsed.v):
        raise ConfigError(f"KV format must say what auto stands for, got {kind!r}")
    return make_codec(parsed, bias=name.endswith(WITH_BIAS))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
