"""Header of a GGUF file, read once."""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Kinds of values of a fixed size, as `struct` and the format number them.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch has it; the file lists the fastest first."""
    kind: GGMLQuantizationType
    offset: int
    """Distance from the file's beginning, in bytes."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in bytes: rows of whole blocks."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return (*self.shape[:-1], self.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        return prod(self.stored_shape)


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of a GGUF file, and its tensors' places."""

    path: Path
    values: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, ...]]
    """Numbers of the values' types; a list's is followed by that of its entries."""
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def read(cls, path: Path) -> "GgufHeader":
        """Read a file's header.

        Raises:
            ValueError, struct.error, OverflowError: it is damaged, or of a kind that is not read; names what is wrong.
        """
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[: len(MAGIC)] != MAGIC:
                raise ValueError("it does not begin with GGUF")
            version, num_tensors, num_values = cursor.unpack("<IQQ")
            if version not in _VERSIONS:
                raise ValueError(f"its version must be {' or '.join(map(str, _VERSIONS))}, is {version}")
            values: dict[str, Any] = {}
            kinds = {}
            for _ in range(num_values):
                key = cursor.text()
                if key in values:
                    raise ValueError(f"it holds {key!r} twice")
                values[key], kinds[key] = cursor.value()
            if "general.architecture" not in values:
                raise ValueError("it has no general.architecture")
            places = [_read_place(cursor) for _ in range(num_tensors)]
            alignment = values.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 1:
                raise ValueError(f"general.alignment must be a whole number above 0, got {alignment!r}")
            start = -(-cursor.position // alignment) * alignment
            tensors = tuple(
                GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in places
            )
            return cls(path, values, kinds, tensors)

    @cached_property
    def end(self) -> int:
        """End of the last tensor in the file, in bytes."""
        return max((tensor.offset + tensor.nbytes for tensor in self.tensors), default=0)

    @property
    def architecture(self) -> str:
        """Name of the architecture in llama.cpp."""
        return str(self.values["general.architecture"])

    def array(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Return a tensor as it is stored, mapped: uint8 of `stored_shape`, or numbers of its shape (F32, I8 ...)."""
        kind = _NUMPY.get(tensor.kind.name)
        shape = tensor.shape if kind else tensor.stored_shape
        return np.memmap(self.path, kind or np.uint8, "r", tensor.offset, shape)


_NUMPY: dict[str, Any] = {
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


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
        if kind == _STRING:
            return self.text(), (kind,)
        if kind != _ARRAY:
            return self.unpack(f"<{_form(kind)}")[0], (kind,)
        entry, count = self.unpack("<IQ")
        if entry == _STRING:
            return self.texts(count), (kind, entry)
        return list(self.unpack(f"<{count}{_form(entry)}")), (kind, entry)


def _form(kind: int) -> str:
    form = _FIXED.get(kind)
    if form is None:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return form


def _read_place(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Return a tensor's name, shape, kind, and offset from where the tensors begin."""
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
