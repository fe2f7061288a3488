"""Reader that lets transformers read a GGUF file through its header, which is parsed once.

transformers asks the package gguf for the file three times, seconds each over a large vocabulary, and for the table of
tensors' names once for each module of the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import cache, partial
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import is_progress_bar_enabled

from winnow.models.load.gguf.architectures import KEYS, TURNED, complete_config
from winnow.models.load.gguf.header import ARRAY, STRING, GgufHeader, GgufTensor
from winnow.models.model.blocks import RAW, Blocks
from winnow.process.progress import report

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
            key: len(value) if kind == (ARRAY, STRING) and key not in string_arrays else value
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
    found = theirs(*args, **options)
    if "tensors" not in found:
        return found
    of = {each.name: each for each in header.tensors}

    def take(name: str) -> torch.Tensor:
        return read_numbers(header, of[name])

    for n in range(header.values["gpt-oss.block_count"]):
        layer, experts = f"model.layers.{n}", f"model.layers.{n}.mlp.experts"
        found["tensors"][f"{layer}.self_attn.sinks"] = take(f"blk.{n}.attn_sinks.weight")
        for end, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (take(f"blk.{n}.ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
            both = torch.stack([gate, up], dim=2).flatten(1, 2)  # one behind the other
            found["tensors"][f"{experts}.gate_up_proj{suffix}"] = both if suffix else both.mT
            found["tensors"][f"{experts}.down_proj{suffix}"] = down if suffix else down.mT
    return found


def read_numbers(header: GgufHeader, tensor: GgufTensor) -> torch.Tensor:
    """Return the numbers of a tensor in float32."""
    numbers = import_module("gguf.quants").dequantize(header.array(tensor), tensor.kind)
    return torch.from_numpy(np.array(numbers, np.float32))


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
    entries = value if kind[0] == ARRAY else [value]
    parts = [entry.encode() if isinstance(entry, str) else [entry] for entry in entries]
    return SimpleNamespace(types=list(kind), parts=parts, data=range(len(parts)))
