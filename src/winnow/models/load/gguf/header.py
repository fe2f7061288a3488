"""The header of a GGUF file: what is said of the model, and where its tensors lie. No transformers."""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# Kinds of values of a fixed size, as `struct` and the format number them.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
BY_LAYER = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("feed_forward_length", "rope.dimension_count"),
)
"""Keys that may hold a number, or one for each layer."""


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as torch has it; the file lists the fastest first
    kind: GGMLQuantizationType
    path: Path  # of the part that holds it
    offset: int  # distance from that file's beginning, in bytes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        block, size = GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        return prod(self.stored_shape)


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    values: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, ...]]
    """Numbers of the values' types; a list's is followed by that of its entries."""
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def join(cls, paths: Sequence[Path]) -> "GgufHeader":
        """Read the headers of a file's parts, in order, as one: the first has the keys. Raises ValueError: a part is
        another file's; and as `read`."""
        parts = [cls.read(path) for path in paths]
        if "general.architecture" not in parts[0].values:
            raise ValueError("it has no general.architecture")
        for index, part in enumerate(parts if len(parts) > 1 else ()):
            number, count = part.values.get("split.no", 0), part.values.get("split.count", 1)
            if (number, count) != (index, len(parts)):
                raise ValueError(f"{part.path.name} is part {number + 1} of {count} by what it says")
        return replace(parts[0], tensors=tuple(tensor for part in parts for tensor in part.tensors))

    @classmethod
    def read(cls, path: Path) -> "GgufHeader":
        """Read the header of one file. Raises ValueError, struct.error, OverflowError: it is damaged, or of a kind that
        is not read."""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin with GGUF")
            version, num_tensors, num_values = cursor.unpack("<IQQ")
            if not version & 0xFFFF:
                raise ValueError("its numbers are big-endian, and little-endian files alone are read")
            if version not in _VERSIONS:
                raise ValueError(f"its version must be {' or '.join(map(str, _VERSIONS))}, is {version}")
            values: dict[str, Any] = {}
            kinds = {}
            for _ in range(num_values):
                key = cursor.text()
                if key in values:
                    raise ValueError(f"it holds {key!r} twice")
                values[key], kinds[key] = cursor.value()
            for key in (f"{values.get('general.architecture')}.{name}" for name in BY_LAYER):
                given = values.get(key)
                if isinstance(given, list) and len(set(given)) == 1:  # one for each layer, all the same
                    values[key], kinds[key] = given[0], kinds[key][1:]
            places = [_read_place(cursor) for _ in range(num_tensors)]
            alignment = values.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 1:
                raise ValueError(f"general.alignment must be a whole number above 0, got {alignment!r}")
            start = -(-cursor.position // alignment) * alignment
            return cls(path, values, kinds, tuple(GgufTensor(*x[:3], path, start + x[3]) for x in places))

    def end(self, path: Path) -> int:
        """Return the byte at which the tensors of a part end."""
        return max((each.offset + each.nbytes for each in self.tensors if each.path == path), default=0)

    @property
    def architecture(self) -> str:
        return str(self.values["general.architecture"])

    def array(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Return a tensor as it is stored, mapped: uint8 of `stored_shape`, or numbers of its shape (F32, I8 ...)."""
        kind = _NUMPY.get(tensor.kind.name)
        shape = tensor.shape if kind else tensor.stored_shape
        # torch warns of arrays that cannot be written to; these are only read, so that no page is copied.
        return np.memmap(tensor.path, kind or np.uint8, "c", tensor.offset, shape)


_NUMPY: dict[str, Any] = {f"F{bits}": getattr(np, f"float{bits}") for bits in (16, 32, 64)}
_NUMPY |= {f"I{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)}


class _Cursor:
    """Cursor that reads one thing after another; `struct` refuses what is cut short."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(MAGIC)

    def unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self.position)
        self.position += struct.calcsize(form)
        return found

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        data, position, length = self._data, self.position, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (size,) = length(data, position)
            position += 8
            end = position + size
            if end > len(data):
                raise ValueError(f"a text of {size} bytes at byte {position} passes its end")
            found.append(data[position:end].decode())
            position = end
        self.position = position
        return found

    def value(self) -> tuple[Any, tuple[int, ...]]:
        (kind,) = self.unpack("<I")
        if kind == STRING:
            return self.text(), (kind,)
        if kind != ARRAY:
            return self.unpack(f"<{_form(kind)}")[0], (kind,)
        entry, count = self.unpack("<IQ")
        if entry == STRING:
            return self.texts(count), (kind, entry)
        return list(self.unpack(f"<{count}{_form(entry)}")), (kind, entry)


def _form(kind: int) -> str:
    form = _FIXED.get(kind)
    if form is None:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return form


def _read_place(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.text()
    (num_dims,) = cursor.unpack("<I")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"{name} has {num_dims} dimensions, {_MAX_DIMS} is the limit")
    shape = tuple(reversed(cursor.unpack(f"<{num_dims}Q")))
    number, offset = cursor.unpack("<IQ")
    kind = GGMLQuantizationType(number)  # ValueError: this version of gguf does not know it
    block, _ = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ValueError(f"rows of {name} must be of whole blocks of {block} numbers, got {shape}")
    return name, shape, kind, offset
