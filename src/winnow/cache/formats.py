"""Formats of one side of a KV, a key or a value, in the bytes of its slot.

A vector of d channels is cut into groups of g (`_Grouped.channels`; a multiple of 8 at 4 bits and below). The fields of
a side, with NAME the side, `k` or `v`; a pool's field of that name is [num_blocks, block_size, length]:

    format         fields, in the order in which they lie in a block              channel i, of group i // g
    float32, ...   NAME dtype[d]                                                  NAME[i]
    fp8_e4m3       NAME uint8[d] (bits of e4m3fn), NAME_scale f16[d/g]            e4m3(NAME[i]) * scale
    int8           NAME int8[d], NAME_scale f16[d/g]                              NAME[i] * scale
    int4 3 2       NAME uint8[d*bits/8], NAME_scale f16[d/g], NAME_min f16[d/g]   code[i] * scale + min
    int4-outlier   as int4, then NAME_outlier f16[n], NAME_channel uint8[n]       + outlier[m] if channel[m] = i

`winnow.cache.packing` says where the code of a channel lies in its group's bytes. n is the nearest to 1 % of the
channels, at least 1; outliers of a vector are in distinct channels, and what is stored is the rest beside the decoded
code, so that it is added whatever the code. Codes of int8 are -127 to 127; those of b bits 0 to 2**b - 1.

All arithmetic is float32. Encoding, which kernels repeat operation by operation (no fused multiply-add; `/` and
`round`, to nearest even, as IEEE 754 has them):

    int8, fp8:  scale = f16(max |x| / Q), Q = 127 or 448; y = x / scale, or 0 where scale is 0;
                code = round(y) held in -127..127, or e4m3(y held in -448..448)
    b bits:     min = f16(least x), scale = f16((greatest x - min) / (2**b - 1));
                code = round((x - min) / scale) held in 0..2**b-1, or 0 where scale is 0
    outliers:   n times the channel with the greatest |x| that is left, ties to the first; they count for neither min
                nor scale; outlier = f16(x - (code * scale + min))

A vector with NaN, infinity, or a value whose scale or min is beyond float16 decodes to NaN in that group, which makes
the logits of its request not finite and so fails the request by name, and no other.

Imports no torch until something is encoded or decoded.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from winnow.errors import ConfigError
from winnow.values.kv_dtype import NARROW_BITS, PLAIN_FORMATS

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
"""Bytes of one element by the name that torch gives its dtype."""


class Field(NamedTuple):
    """One tensor of a codec: `length` elements per slot, of a type of `ITEM_BYTES`."""

    name: str
    dtype: str
    length: int

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        return self.length * self.item_bytes


class VectorFormat(ABC):
    """Format of a vector of `head_dim` channels."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)
    """Suffixes of the side's name in those of the fields, in their order."""

    @property
    @abstractmethod
    def name(self) -> str:
        """One of `winnow.values.kv_dtype.KV_FORMATS`."""

    @abstractmethod
    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        """Return the fields of the side of that name. Raises ConfigError: such vectors cannot be stored so."""

    @abstractmethod
    def encode(self, x: "Tensor") -> "tuple[Tensor, ...]":
        """Encode vectors, float [..., d]: what the fields hold, in order."""

    @abstractmethod
    def decode(self, *fields: "Tensor") -> "Tensor":
        """Decode what fields hold, in order: float32 [..., d], which may share memory with them."""


@dataclass(frozen=True)
class PlainFormat(VectorFormat):
    """Vectors rounded to a floating-point format."""

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        return (Field(side, self.dtype, head_dim),)

    def encode(self, x: "Tensor") -> "tuple[Tensor, ...]":
        return (x,)  # the pool rounds what it stores

    def decode(self, *fields: "Tensor") -> "Tensor":
        return fields[0].float()


@dataclass(frozen=True)
class _Grouped(VectorFormat):
    """Formats whose channels are scaled in groups."""

    group: int | None = None
    """Channels of a group; None: `default_group`."""

    def channels(self, head_dim: int) -> int:
        """Return channels of a group. Raises ConfigError: groups do not divide the head."""
        group = self.default_group(head_dim) if self.group is None else self.group
        if head_dim % group:
            raise ConfigError(
                f"kv_group must divide the model's head_dim ({head_dim}) for {self.name} KVs, got {group}"
            )
        return group

    def default_group(self, head_dim: int) -> int:
        return head_dim

    def _scales(self, side: str, head_dim: int) -> Field:
        return Field(f"{side}_scale", "float16", head_dim // self.channels(head_dim))


@dataclass(frozen=True)
class SymmetricFormat(_Grouped):
    """8 bits a channel around zero: integers, or floats of 4 exponent bits and 3 of mantissa."""

    suffixes = ("", "_scale")
    floating: bool = False

    @property
    def name(self) -> str:
        return "fp8_e4m3" if self.floating else "int8"

    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        code = Field(side, "uint8" if self.floating else "int8", head_dim)
        return code, self._scales(side, head_dim)

    def encode(self, x: "Tensor") -> "tuple[Tensor, ...]":
        import torch

        grouped = x.float().unflatten(-1, (-1, self.channels(x.shape[-1])))
        most = 448 if self.floating else 127
        scale = (grouped.abs().amax(dim=-1, keepdim=True) / most).half()
        y = _divided(grouped, scale.float())
        if self.floating:
            code = y.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            code = y.round().clamp(-most, most).to(torch.int8)
        return code.flatten(-2), scale[..., 0]

    def decode(self, *fields: "Tensor") -> "Tensor":
        import torch

        code, scale = fields
        if self.floating:
            code = code.view(torch.float8_e4m3fn)
        grouped = code.float().unflatten(-1, (scale.shape[-1], -1))
        return (grouped * scale.float()[..., None]).flatten(-2)


@dataclass(frozen=True)
class AffineFormat(_Grouped):
    """A few bits a channel between the least and the greatest of the group."""

    suffixes: ClassVar[tuple[str, ...]] = ("", "_scale", "_min")
    bits: int = 4

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def channels(self, head_dim: int) -> int:
        if head_dim % 8:
            raise ConfigError(
                f"{self.name} KVs need a head_dim that is a multiple of 8, as codes are packed in bytes, got {head_dim}"
            )
        return super().channels(head_dim)

    def default_group(self, head_dim: int) -> int:
        """Return the most channels up to 32, in whole bytes of codes."""
        return next(n for n in (32, 24, 16, 8) if head_dim % n == 0)

    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        scales = self._scales(side, head_dim)
        code = Field(side, "uint8", head_dim * self.bits // 8)
        return code, scales, scales._replace(name=f"{side}_min")

    def encode(self, x: "Tensor") -> "tuple[Tensor, ...]":
        x = x.float()
        return self._encode(x, x, x)

    def decode(self, *fields: "Tensor") -> "Tensor":
        from winnow.cache.packing import unpack

        packed, scale, least = fields
        groups = scale.shape[-1]
        group = packed.shape[-1] * 8 // self.bits // groups
        code = unpack(packed, self.bits, group).float().unflatten(-1, (groups, -1))
        return (code * scale.float()[..., None] + least.float()[..., None]).flatten(-2)

    def _encode(self, x: "Tensor", low: "Tensor", high: "Tensor") -> "tuple[Tensor, ...]":
        """Encode x with the range from the least of `low` to the greatest of `high`, in each group; all [..., d]."""
        import torch

        from winnow.cache.packing import pack

        group = self.channels(x.shape[-1])
        levels = 2**self.bits - 1
        least = low.unflatten(-1, (-1, group)).amin(dim=-1, keepdim=True).half()
        most = high.unflatten(-1, (-1, group)).amax(dim=-1, keepdim=True)
        scale = ((most - least.float()) / levels).clamp_min(0.0).half()
        y = _divided(x.unflatten(-1, (-1, group)) - least.float(), scale.float())
        code = y.round().clamp(0, levels).to(torch.uint8).flatten(-2)
        return pack(code, self.bits, group), scale[..., 0], least[..., 0]


@dataclass(frozen=True)
class OutlierFormat(AffineFormat):
    """`AffineFormat`, and the largest channels of a vector in 16 bits (as KVQuant and GEAR keep some).

    What is stored of such a channel is its difference from its code. Where that exceeds float16's range, since numbers
    of a vector are more than 65,504 apart, the channel decodes to NaN.
    """

    suffixes = ("", "_scale", "_min", "_outlier", "_channel")
    share: float = 0.01

    @property
    def name(self) -> str:
        return f"int{self.bits}-outlier"

    def count(self, head_dim: int) -> int:
        return max(1, round(self.share * head_dim))

    def fields(self, side: str, head_dim: int) -> tuple[Field, ...]:
        if head_dim > 256:
            raise ConfigError(
                f"{self.name} KVs need a head_dim of at most 256, as a channel's index is a byte, got {head_dim}"
            )
        count = self.count(head_dim)
        return (
            *super().fields(side, head_dim),
            Field(f"{side}_outlier", "float16", count),
            Field(f"{side}_channel", "uint8", count),
        )

    def encode(self, x: "Tensor") -> "tuple[Tensor, ...]":
        import torch

        x = x.float()
        left = x.abs()
        channels = []
        for _ in range(self.count(x.shape[-1])):
            channels.append(left.argmax(dim=-1, keepdim=True))
            left = left.scatter(-1, channels[-1], -1.0)
        channel = torch.cat(channels, dim=-1)
        kept = x.gather(-1, channel)
        coded = self._encode(x, x.scatter(-1, channel, torch.inf), x.scatter(-1, channel, -torch.inf))
        rest = (kept - super().decode(*coded).gather(-1, channel)).half()
        # Infinity could make a logit -inf, which attention takes for a mask; NaN is noticed.
        return *coded, rest.masked_fill(rest.isinf(), torch.nan), channel.to(torch.uint8)

    def decode(self, *fields: "Tensor") -> "Tensor":
        *coded, outlier, channel = fields
        x = super().decode(*coded)
        # A slot that was never written holds any index.
        return x.scatter_add(-1, channel.long().clamp_max(x.shape[-1] - 1), outlier.float())


def make_format(name: str, group: int | None = None) -> VectorFormat:
    """Return the format of that name, one of `KV_FORMATS` but `auto`; `group` is ignored by those without groups."""
    if name in PLAIN_FORMATS:
        return PlainFormat(name)
    if name not in NARROW_BITS:
        return SymmetricFormat(group, floating=name == "fp8_e4m3")
    kind = OutlierFormat if name == "int4-outlier" else AffineFormat
    return kind(group, NARROW_BITS[name])


def _divided(x: "Tensor", scale: "Tensor") -> "Tensor":
    """Return x / scale, and 0 where that is no number: where the scale is 0 or not finite."""
    return (x / scale).nan_to_num(0.0, 0.0, 0.0).masked_fill(scale == 0.0, 0.0)
