"""Format by which kernels find and decode a side of the KVs, a constant with which they are compiled."""

from dataclasses import dataclass
from typing import Any

import triton.language as tl

from winnow.cache import BlockKind
from winnow.cache.codec import BIAS, BlockFormat, PairCodec
from winnow.cache.formats import AffineFormat, PlainFormat, SymmetricFormat, VectorFormat
from winnow.errors import ConfigError
from winnow.values.kv_dtype import KV_FORMATS

# Suffixes of fields, by their names in a `SideFormat`.
_SUFFIXES = {"scale": "scale", "least": "min", "outlier": "outlier", "channel": "channel"}


@dataclass(frozen=True)
class SideFormat:
    """Places of the fields of a side in a block, in bytes from its start, and their meaning.

    Attributes:
        kind: "plain", "int8", "fp8_e4m3", or "affine": codes of `bits` bits with scale and minimum.
        dtype: Triton's, of the field named as the side: vectors or codes.
        item_bytes: of an element of that field.
        code_length: elements of that field in a slot.
        group: channels that share a scale.
        block_size, block_bytes: slots of a block, and bytes to the next one.
        code, scale, least, outlier, channel: offsets of fields; 0 where there is none.
        outliers: of a vector.
        bias: offset of the KV's bias, which keys have; 0 where there is none.
    """

    kind: str
    dtype: Any
    item_bytes: int
    code_length: int
    head_dim: int
    group: int
    bits: int
    block_size: int
    block_bytes: int
    code: int
    scale: int = 0
    least: int = 0
    outlier: int = 0
    channel: int = 0
    outliers: int = 0
    bias: int = 0

    @property
    def row_scaled(self) -> bool:
        """One scale multiplies the whole vector, so that products can be scaled instead."""
        return self.kind in ("int8", "fp8_e4m3") and self.group == self.head_dim


@dataclass(frozen=True)
class Window:
    """Reach of queries: fewer than `size` positions back, or back to the start of their chunk of `size` tokens."""

    size: int
    chunked: bool


def reads(*codecs: PairCodec) -> bool:
    known = PlainFormat | SymmetricFormat | AffineFormat
    return all(isinstance(form, known) for codec in codecs for form in (codec.key, codec.value))


def readable(codec: PairCodec) -> PairCodec:
    """Return a codec of KVs that kernels read. Raises ConfigError: it is another; names it."""
    if reads(codec):
        return codec
    raise ConfigError(
        f"attention_backend triton reads KVs stored as one of {', '.join(KV_FORMATS[1:])}, got {codec.name}"
    )


def side_formats(kind: BlockKind) -> dict[str, SideFormat]:
    codec, form = readable(kind.codec), kind.form
    return {
        "KEY": _side_format(kind, form, "k", codec.key),
        "VALUE": _side_format(kind, form, "v", codec.value),
    }


def key_format(kind: BlockKind) -> SideFormat | None:
    """Return how keys are stored, wherever values lie; None: not as they are, or as kernels do not read."""
    codec = kind.codec
    if not reads(codec) or codec.rotate_keys:
        return None
    return _side_format(kind, kind.form if kind.tier is None else kind.key_form, "k", codec.key)


def _side_format(blocks: BlockKind, block: BlockFormat, side: str, form: VectorFormat) -> SideFormat:
    head_dim = blocks.key_size if side == "k" else blocks.value_size
    placed = {field.name: (field, offset) for field, offset in block.fields}
    field, code = placed[side]
    offsets = {
        name: placed[f"{side}_{suffix}"][1]
        for name, suffix in _SUFFIXES.items()
        if f"{side}_{suffix}" in placed
    }
    kind, bits = "plain" if isinstance(form, PlainFormat) else form.name, 8
    if isinstance(form, AffineFormat):
        kind, bits = "affine", form.bits
    return SideFormat(
        kind=kind,
        dtype=getattr(tl, field.dtype),
        item_bytes=field.item_bytes,
        code_length=field.length,
        head_dim=head_dim,
        group=head_dim // placed[f"{side}_scale"][0].length if "scale" in offsets else head_dim,
        bits=bits,
        block_size=blocks.size,
        block_bytes=block.nbytes,
        code=code,
        outliers=placed[f"{side}_outlier"][0].length if "outlier" in offsets else 0,
        bias=placed[BIAS.name][1] if side == "k" and BIAS.name in placed else 0,
        **offsets,
    )
