"""Weights in blocks, as GGUF files have them: codes of few bits, and a scale and a minimum for 32 or 16 inputs.

Blocks of a file stay as they are, and native kernels multiply them without another rounding (`native/blocks.h`). What a
block stands for is GGUF's own formula, computed in float32:

    Q8_0: code * scale, codes from -128 to 127        Q4_0: (code - 8) * scale, codes from 0 to 15

These two are also what weights of 16 bits are quantized to, here in plain torch; the others come from files alone.
F8_E4M3 is none of GGUF's: codes are floats of 8 bits, and scales of 32, as checkpoints in fp8 have them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from winnow.config import ModelConfig
from winnow.models.model.experts import is_experts, linear_of, product_names
from winnow.models.model.geometry import decoder_layers
from winnow.process import native

BLOCK = 32
"""Inputs of a feature that share a scale."""
_OF32 = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "IQ4_NL": 18, "MXFP4": 17, "F8_E4M3": 36}
_OF256 = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_XS": 136}
RAW = {kind: (inputs, size) for inputs, of in ((32, _OF32), (256, _OF256)) for kind, size in of.items()}
"""Inputs and bytes of a block, by its name in llama.cpp."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class LibraryLayers(ABC):
    """Choice of the linear layers that a library multiplies on a GPU: a plug-in's, by `winnow.weights`."""

    weight_dtype: str = "int8"

    @abstractmethod
    def join(self, linears: Sequence[nn.Linear]) -> nn.Module:
        """Return one product in place of several of the same input, which stay as they are."""


@dataclass(frozen=True)
class BlockWeights:
    """Choice of the linear layers whose weights are in blocks, for CPUs."""

    kind: str | None = None  # name of their blocks in llama.cpp; None: those of the model's file

    @classmethod
    def of(cls, config: ModelConfig, *, kept: bool = False) -> Self | None:
        """Return the choice as configured; None: no layers have them. Blocks of the file stay as they are, if `kept`,
        where nothing else is configured. Raises ConfigError: the form is one for GPUs alone."""
        config.check_weight_device("cpu")
        if config.weight_dtype == "auto":
            return cls() if kept else None
        kind = "Q4_0" if config.weight_dtype == "q4_0" else "Q8_0"
        return cls(kind)

    @property
    def weight_dtype(self) -> str:
        return "auto" if self.kind is None else self.kind.lower()

    def parts(self, linears: Sequence[nn.Linear]) -> "list[Blocks] | None":
        """Return the blocks of each of some layers; None: one of them has none, and cannot have them."""
        if self.kind is not None and any(each.in_features % BLOCK for each in linears):
            return None
        found = [own_blocks(each) for each in linears]
        if self.kind is None:
            # Codes that are floats lie beside no others: some kernels multiply them as floats.
            floats = {own is not None and own.kind == "F8_E4M3" for own in found}
            return None if None in found or len(floats) > 1 else [own for own in found if own is not None]
        return [
            own if own is not None and own.kind == self.kind else quantize(dense_weight(each), self.kind)
            for own, each in zip(found, linears, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A weight [out_features, in_features] in blocks of one kind, as a file has them."""

    kind: str
    data: Tensor  # uint8 [out_features, bytes of a row], rows dense

    def __deepcopy__(self, memo: dict[int, Any]) -> "Blocks":
        return self  # immutable

    @property
    def shape(self) -> tuple[int, ...]:
        inputs, size = RAW[self.kind]
        return *self.data.shape[:-1], self.data.shape[-1] // size * inputs

    def of_expert(self, index: int) -> "Blocks":
        return Blocks(self.kind, self.data[index])

    def numbers(self, dtype: torch.dtype, kernels: "native.Kernels | None" = None) -> Tensor:
        if self.data.ndim > 2:
            return Blocks(self.kind, self.data.flatten(0, -2)).numbers(dtype).view(self.shape)
        kernels = kernels or native.native_kernels()
        if kernels is None:
            return _numbers(self).to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device="cpu")
        form = native.native_dtype(dtype)
        kernels.dequantize_blocks(self.raw(), form, out.data_ptr(), torch.get_num_threads())
        return out

    def raw(self) -> "native.RawBlocks":
        assert self.data.is_contiguous()
        out_features, in_features = self.shape
        kind = getattr(native.BlockKind, self.kind)
        return native.RawBlocks(kind, self.data.data_ptr(), in_features, out_features)


def quantize(weight: Tensor, kind: str) -> Blocks:
    """Return a weight [out_features, in_features] in blocks of Q8_0 or Q4_0, rounded as llama.cpp does; a block with a
    number that is not finite has a scale that is not a number."""
    largest_code = {"Q8_0": 127, "Q4_0": -8}[kind]
    made = []
    for part in weight.split(_ROWS_AT_ONCE):  # a head in float32 can be larger than all the rest
        x = part.float().view(len(part), -1, BLOCK)
        at = x.abs().argmax(dim=-1, keepdim=True)  # of the number that takes the largest code
        largest = x.gather(-1, at)
        scale = (largest.abs() if kind == "Q8_0" else largest) / largest_code
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        usable = x.isfinite().all(dim=-1, keepdim=True)
        scale = torch.where(usable, scale, float("nan")).half()
        codes = torch.where(usable, x * inverse, 0.0)
        if kind == "Q8_0":
            stored = codes.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        else:
            four = (codes + 8.5).clamp(0, 15).to(torch.uint8)
            stored = four[..., :16] | four[..., 16:] << 4
        made.append(torch.cat([scale.view(torch.uint8), stored], dim=-1).flatten(1))
    return Blocks(kind, torch.cat(made))


def _numbers(blocks: Blocks) -> Tensor:
    """Return the numbers of Q8_0, Q4_0 or F8_E4M3 in float32, in plain torch."""
    raw = blocks.data.view(len(blocks.data), -1, RAW[blocks.kind][1])
    if blocks.kind == "F8_E4M3":
        scale, codes = raw[..., :4].contiguous().view(torch.float32), raw[..., 4:].contiguous()
        return (scale * codes.view(torch.float8_e4m3fn).float()).flatten(1)
    scale, stored = raw[..., :2].contiguous().view(torch.float16).float(), raw[..., 2:]
    if blocks.kind == "Q8_0":
        return (scale * stored.view(torch.int8)).flatten(1)
    codes = torch.cat([stored & 15, stored >> 4], dim=-1)
    return (scale * (codes.float() - 8)).flatten(1)


def own_blocks(module: nn.Module, name: str = "weight") -> Blocks | None:
    kept: dict[str, Blocks] = getattr(module, "kept_blocks", {})
    return kept.get(name)


def dense_weight(linear: nn.Linear) -> Tensor:
    """Return a layer's weight as numbers; of blocks in float32."""
    own = own_blocks(linear)
    return linear.weight.detach() if own is None else own.numbers(torch.float32)


def keep_blocks(module: nn.Module, name: str, blocks: Blocks, like: Tensor) -> None:
    """Let a module's parameter have blocks, whose numbers are there only while it computes: what reads it in between
    finds NaN, so that no answer comes of it."""
    if not hasattr(module, "kept_blocks"):
        module.kept_blocks = {}  # type: ignore[assignment]
        module.register_forward_pre_hook(_lend)
        module.register_forward_hook(_take_back)
    kept: dict[str, Blocks] = module.kept_blocks  # type: ignore[assignment]
    kept[name] = blocks
    setattr(module, name, _nan_parameter(blocks.shape, like))


def attach_blocks(model: nn.Module, blocks: Mapping[str, Blocks], device: torch.device) -> None:
    """Let layers, embeddings and experts that names of parameters belong to keep their blocks, with numbers on `device`
    while they compute; others get numbers."""
    given = {n: parameter for n, parameter in model.named_parameters() if n in blocks}
    copied = any(any(parameter.stride()) for parameter in given.values())
    assert not copied, "zeros were copied in place of blocks"
    of_address = {parameter.data_ptr(): blocks[n] for n, parameter in given.items()}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = of_address.get(parameter.data_ptr())
            if own is None or any(parameter.stride()):
                continue
            plain = type(module) is nn.Linear or isinstance(module, nn.Embedding)
            if plain or (is_experts(module) and not getattr(module, "is_transposed", False)):
                keep_blocks(module, name, own, parameter.new_empty((), device=device))
            else:
                setattr(module, name, nn.Parameter(own.numbers(parameter.dtype), requires_grad=False))


@contextmanager
def widened(module: nn.Module) -> Iterator[None]:
    """Let all below a module have numbers while this lasts, which copies that are made then keep."""
    parts = [each for each in module.modules() if _widen(each)]
    try:
        yield
    finally:
        for each in parts:
            _narrow(each)


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """Let linear layers and embeddings in blocks be one row, repeated, while this lasts: for passes whose numbers do
    not matter, which then do not wait for a whole model to be widened."""
    parts = [each for each in module.modules() if hasattr(each, "kept_blocks") and not is_experts(each)]
    for each in parts:
        kept: dict[str, Blocks] = each.kept_blocks  # type: ignore[assignment]
        for name, own in kept.items():
            row = torch.linspace(-0.1, 0.1, own.shape[-1], device="cpu").to(getattr(each, name))
            setattr(each, name, nn.Parameter(row.expand(own.shape), requires_grad=False))
    try:
        yield
    finally:
        for each in parts:
            _narrow(each)


def widen_for_good(module: nn.Module) -> None:
    """Let all that still has blocks below a module have numbers in their place."""
    made: dict[Blocks, nn.Parameter] = {}
    for each in module.modules():
        kept: dict[str, Blocks] = getattr(each, "kept_blocks", {})
        _widen(each)
        for name, own in kept.items():
            setattr(each, name, made.setdefault(own, getattr(each, name)))
        if kept:
            each._forward_pre_hooks.clear()
            each._forward_hooks.clear()
            del each.kept_blocks


def _lend(module: Any, _: Any) -> None:
    module.lent = _widen(module)


def _take_back(module: Any, _: Any, __: Any) -> None:
    if module.lent:
        _narrow(module)


def _widen(module: Any) -> bool:
    """Return whether a module has got numbers, which it had not."""
    kept: dict[str, Blocks] = getattr(module, "kept_blocks", {})
    narrow = {name: own for name, own in kept.items() if not any(getattr(module, name).stride())}
    for name, own in narrow.items():
        like = getattr(module, name)
        numbers = own.numbers(like.dtype).to(like.device)
        setattr(module, name, nn.Parameter(numbers, requires_grad=False))
    return bool(narrow)


def _narrow(module: Any) -> None:
    for name, own in module.kept_blocks.items():
        setattr(module, name, _nan_parameter(own.shape, getattr(module, name)))


def _nan_parameter(shape: Sequence[int], like: Tensor) -> nn.Parameter:
    """Return a parameter of NaNs, all one number in memory: its shape, dtype and device while it is in blocks."""
    rows = like.new_full((), float("nan")).expand(*shape)
    return nn.Parameter(rows, requires_grad=False)


def round_to_blocks(model: Any, num_layers: int, blocks: BlockWeights) -> None:
    """Round the weights of a model of transformers to what blocks hold, in place, its embedding with its head."""
    layers = decoder_layers(model, num_layers)
    for part in (*layers, model.get_output_embeddings()):
        for module in part.modules():
            if type(module) is nn.Linear:
                _round([module], blocks)
            elif is_experts(module):
                for name in product_names(module):
                    weights = getattr(module, name).detach()
                    weights = weights.mT if module.is_transposed else weights
                    _round([linear_of(each) for each in weights], blocks)


def _round(linears: Sequence[nn.Linear], blocks: BlockWeights) -> None:
    for linear, found in zip(linears, blocks.parts(linears) or (), strict=False):
        linear.weight.data.copy_(found.numbers(linear.weight.dtype))
