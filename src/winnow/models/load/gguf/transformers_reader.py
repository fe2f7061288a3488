"""Reader that lets transformers read a GGUF file through its header, which is parsed once.

transformers asks the package gguf for the file three times, seconds each over a large vocabulary, and for the table of
tensors' names once for each module of the model.
"""

import mmap
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from io import StringIO
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers.utils.logging import is_progress_bar_enabled

from winnow.models.fast.blocks import RAW, Blocks
from winnow.models.load.gguf.architectures import KEYS, TURNED, complete_config
from winnow.process.progress import report

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Kinds of values of a fixed size, as `struct` and the format number them.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
_BY_LAYER = (
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
            for key in (f"{values.get('general.architecture')}.{name}" for name in _BY_LAYER):
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
        return np.memmap(tensor.path, kind or np.uint8, "r", tensor.offset, shape)


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


# Where transformers looks for what reads metadata: it differs between versions, and so do the callers.
_METADATA_READERS = (
    *("transformers.integrations.gguf", "transformers.integrations.gguf.reader"),
    "transformers.quantizers.quantizer_gguf",
)
_LOADER = "transformers.modeling_gguf_pytorch_utils"


@contextmanager
def reading(header: GgufHeader, *, keeps_blocks: bool = False) -> Iterator[dict[str, Blocks]]:
    """Let transformers read the header's file by the header while this lasts, for one thread at a time. Where
    `keeps_blocks`, weights of more than one dimension keep their blocks, which come by the names of the model's
    parameters, and the model gets zeros that take no memory in their place."""
    import gguf

    kept: dict[str, Blocks] = {}

    def read_metadata(path: str, string_arrays: Sequence[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        values = {
            key: len(value) if kind == (_ARRAY, _STRING) and key not in string_arrays else value
            for (key, value), kind in zip(header.values.items(), header.kinds.values(), strict=True)
        }
        return values, tuple(tensor.name for tensor in header.tensors)

    with ExitStack() as stack:
        stack.enter_context(_replaced(gguf, "GGUFReader", lambda path: _Reader(header)))
        stack.enter_context(_replaced(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        for name in _METADATA_READERS:
            try:
                module = import_module(name)
            except ImportError:
                continue
            stack.enter_context(_replaced(module, "read_gguf_metadata", read_metadata))
        if header.architecture == "gpt-oss":
            loader = import_module(_LOADER)
            completed = partial(_with_gpt_oss, loader.load_gguf_checkpoint, header)
            stack.enter_context(_replaced(loader, "load_gguf_checkpoint", completed))
        elif header.architecture in KEYS:
            loader = import_module(_LOADER)
            tables = loader.GGUF_TO_TRANSFORMERS_MAPPING
            added = {**tables, "config": {**tables["config"], header.architecture: KEYS[header.architecture]}}
            turned = dict.fromkeys(TURNED, loader.LlamaTensorProcessor)
            stack.enter_context(_replaced(loader, "GGUF_TO_TRANSFORMERS_MAPPING", added))
            stack.enter_context(_replaced(loader, "GGUF_SUPPORTED_ARCHITECTURES", list(added["config"])))
            stack.enter_context(_replaced(loader, "TENSOR_PROCESSORS", loader.TENSOR_PROCESSORS | turned))
            completed = partial(_completed, loader.load_gguf_checkpoint, header)
            stack.enter_context(_replaced(loader, "load_gguf_checkpoint", completed))
        if keeps_blocks:
            stack.enter_context(_replaced(gguf, "dequantize", _dequantize))
            loader = import_module(_LOADER)
            stack.enter_context(_replaced(loader, "np", _Mapped()))
            names: dict[str, str] = {}
            own_names, theirs = loader.get_gguf_hf_weights_map, loader.load_gguf_checkpoint

            def names_of(*args: Any, **options: Any) -> dict[str, str]:
                found: dict[str, str] = own_names(*args, **options)
                names.update(found)
                return found

            stack.enter_context(_replaced(loader, "get_gguf_hf_weights_map", names_of))
            load = partial(_load, theirs, header, kept, names)
            stack.enter_context(_replaced(loader, "load_gguf_checkpoint", load))
        # The reader draws a progress bar that does not ask whether transformers may draw any.
        if not is_progress_bar_enabled():
            stack.enter_context(redirect_stderr(StringIO()))
        yield kept


def _completed(theirs: Any, header: GgufHeader, *args: Any, **options: Any) -> Any:
    found = theirs(*args, **options)
    complete_config(found["config"], header.values, {each.name for each in header.tensors})
    return found


def _with_gpt_oss(theirs: Any, header: GgufHeader, *args: Any, **options: Any) -> Any:
    """Add GPT-OSS's experts and sinks, for which transformers' reader looks under other names."""
    found, dequantize = theirs(*args, **options), import_module("gguf.quants").dequantize
    if "tensors" not in found:
        return found
    of = {each.name: each for each in header.tensors}

    def take(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(dequantize(header.array(of[name]), of[name].kind)))

    for n in range(header.values["gpt-oss.block_count"]):
        layer, experts = f"model.layers.{n}", f"model.layers.{n}.mlp.experts"
        found["tensors"][f"{layer}.self_attn.sinks"] = take(f"blk.{n}.attn_sinks.weight")
        for end, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (take(f"blk.{n}.ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
            both = torch.stack([gate, up], dim=2).flatten(1, 2)  # one behind the other
            found["tensors"][f"{experts}.gate_up_proj{suffix}"] = both if suffix else both.mT
            found["tensors"][f"{experts}.down_proj{suffix}"] = down if suffix else down.mT
    return found


def _dequantize(data: Any, kind: Any) -> Any:
    """Return numbers of a vector, and a weight's rows of blocks as they are, mapped."""
    if kind.name in RAW and data.ndim > 1:
        return data
    return import_module("gguf.quants").dequantize(data, kind)


class _Mapped:
    """numpy, but that copies of bytes are the bytes themselves."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def copy(self, array: Any) -> Any:
        return array if array.dtype == np.uint8 else np.copy(array)


def _load(
    theirs: Any,
    header: GgufHeader,
    kept: dict[str, Blocks],
    names: dict[str, str],
    path: str,
    return_tensors: bool = False,
    model_to_load: Any = None,
    torch_dtype: torch.dtype | None = None,
) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read
        found = theirs(path, return_tensors, model_to_load)
    if not return_tensors:
        return found
    shapes = {name: parameter.shape for name, parameter in model_to_load.named_parameters()}
    # Weights of experts are parts of parameters, which have no such end.
    of = {names.get(t.name, names.get(t.name.removesuffix(".weight"))): t.kind.name for t in header.tensors}
    for name, tensor in found["tensors"].items():
        if tensor.dtype != torch.uint8:
            found["tensors"][name] = tensor.to(torch_dtype)
            continue
        own = Blocks(of[name], tensor)
        if own.shape != shapes.get(name):
            raise ValueError(f"{name} is of shape {list(own.shape)}, and has {list(shapes.get(name, ()))}")
        kept[name] = own
        found["tensors"][name] = torch.zeros((), dtype=torch_dtype, device="cpu").expand(own.shape)
    return found


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    theirs = getattr(module, name, None)
    if theirs is None:
        yield
        return
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, theirs)


class _Reader:
    """Part of `gguf.GGUFReader` that transformers uses: tensors, and fields, of the tokenizer's none but the
    vocabulary's size, since `read_gguf_metadata` gives those."""

    def __init__(self, header: GgufHeader) -> None:
        self.fields = {
            key: _field(value, kind)
            for (key, value), kind in zip(header.values.items(), header.kinds.values(), strict=True)
            if not key.startswith(("tokenizer.", "gpt-oss.rope.scaling."))  # see `GgufFile.config_values`
        }
        size = f"{header.architecture}.vocab_size"
        tokens = header.values.get("tokenizer.ggml.tokens")
        if tokens is not None and size not in self.fields:
            self.fields[size] = _field(len(tokens), (4,))
        self._header = header

    @property
    def tensors(self) -> Iterator[SimpleNamespace]:
        done, total = 0, sum(tensor.nbytes for tensor in self._header.tensors)
        for tensor in self._header.tensors:
            report("reading weights", done, total, "B")
            done += tensor.nbytes
            named = {"name": tensor.name, "tensor_type": tensor.kind, "shape": tensor.shape[::-1]}
            yield SimpleNamespace(**named, data=self._header.array(tensor))

    def get_field(self, key: str) -> SimpleNamespace | None:
        return self.fields.get(key)


def _field(value: Any, kind: tuple[int, ...]) -> SimpleNamespace:
    entries = value if kind[0] == _ARRAY else [value]
    parts = [entry.encode() if isinstance(entry, str) else [entry] for entry in entries]
    return SimpleNamespace(types=list(kind), parts=parts, data=range(len(parts)))
