"""How a KV is stored: the fields of a slot, their bytes, and the way from vectors to fields and back.

What a codec says of itself is host arithmetic, which the ledger and the planner need: this module imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from winnow.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element by the name that torch gives its dtype."""


class Field(NamedTuple):
    """One tensor of a codec: `length` elements per slot."""

    name: str
    dtype: str
    """A key of `ITEM_BYTES`."""
    length: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        return self.length * self.item_bytes


class PlacedField(NamedTuple):
    """Where a field lies in a block: `block_size` slots of it side by side, from byte `offset` on."""

    field: Field
    offset: int


@dataclass(frozen=True)
class BlockFormat:
    """The bytes of a block of KVs: its fields one after the other, each aligned to its elements.

    Attributes:
        fields: in the order in which they lie.
        nbytes: from one block to the next.
    """

    fields: tuple[PlacedField, ...]
    nbytes: int

    @classmethod
    def of(cls, fields: tuple[Field, ...], block_size: int) -> "BlockFormat":
        placed, end = [], 0
        for field in fields:
            offset = round_up(end, field.item_bytes)
            placed.append(PlacedField(field, offset))
            end = offset + block_size * field.slot_bytes
        return cls(tuple(placed), round_up(end, max(field.item_bytes for field in fields)))


class KVCodec(ABC):
    """How the key and the value of a token are stored in a slot.

    Everything needed to decode one KV lies in its slot (scales too), so a KV moves by copying its fields.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which options and reports know the codec."""

    @abstractmethod
    def key_fields(self, head_dim: int) -> tuple[Field, ...]:
        """The fields that store a key of `head_dim` elements, in the order in which a block holds them."""

    @abstractmethod
    def value_fields(self, head_dim: int) -> tuple[Field, ...]:
        """The fields that store a value of `head_dim` elements, in order; a block holds them after those of keys."""

    def fields(self, head_dim: int) -> tuple[Field, ...]:
        """All fields of a slot, in the order in which a block holds them."""
        return self.key_fields(head_dim) + self.value_fields(head_dim)

    @abstractmethod
    def encode_keys(self, k: "Tensor") -> "dict[str, Tensor]":
        """Encode keys, [..., d]: the fields that store them, [..., length] each.

        The pool converts each to its field's dtype when it stores it, rounding to nearest even.
        """

    @abstractmethod
    def encode_values(self, v: "Tensor") -> "dict[str, Tensor]":
        """Encode values, [..., d]; as `encode_keys`."""

    @abstractmethod
    def keys(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        """Decode keys from `key_fields`, [..., length] each: float32 [..., d], which may share memory with them."""

    @abstractmethod
    def values(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        """Decode values from `value_fields`, [..., length] each; as `keys`."""

    def encode(self, k: "Tensor", v: "Tensor") -> "dict[str, Tensor]":
        """Encode KVs, [..., d] each: all fields."""
        return self.encode_keys(k) | self.encode_values(v)


@dataclass(frozen=True)
class PlainCodec(KVCodec):
    """Vectors rounded to one floating-point format: `k dtype[d], v dtype[d]`."""

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    def key_fields(self, head_dim: int) -> tuple[Field, ...]:
        return (Field("k", self.dtype, head_dim),)

    def value_fields(self, head_dim: int) -> tuple[Field, ...]:
        return (Field("v", self.dtype, head_dim),)

    def encode_keys(self, k: "Tensor") -> "dict[str, Tensor]":
        return {"k": k}

    def encode_values(self, v: "Tensor") -> "dict[str, Tensor]":
        return {"v": v}

    def keys(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        return fields["k"].float()

    def values(self, fields: "Mapping[str, Tensor]") -> "Tensor":
        return fields["v"].float()


CODECS: Mapping[str, KVCodec] = {name: PlainCodec(name) for name in ("float32", "bfloat16", "float16")}
"""The codecs by name."""


def plain_format(codec: KVCodec, reader: str) -> str:
    """The name of the format of plain vectors, for code that reads the fields `k` and `v` itself.

    Raises:
        ConfigError: the codec stores something else; names the `reader`.
    """
    if not isinstance(codec, PlainCodec):
        plain = [name for name, known in CODECS.items() if isinstance(known, PlainCodec)]
        raise ConfigError(f"{reader} reads KVs stored as one of {', '.join(plain)}, got {codec.name}")
    return codec.dtype


def codec_of(kind: "KVCodec | str | torch.dtype") -> KVCodec:
    """The codec of that name; a torch dtype stands for the codec that stores vectors in it.

    Raises:
        ConfigError: no codec has that name.
    """
    if isinstance(kind, KVCodec):
        return kind
    name = str(kind).removeprefix("torch.")
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError(f"KV format must be one of {', '.join(CODECS)}, got {name!r}")
    return codec


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
