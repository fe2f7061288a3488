"""Linear layers of int8 weights in plain torch: what the kernels compute, to the last bit.

A weight has a scale for each output feature, a row of activations one for each group of `GROUP` inputs, taken anew in
every call (W8A8):

    weight[o, i] = code[o, i] * scale[o]        x[t, i] = code[t, i] * scale[t, i / GROUP]        codes from -127 to 127

Codes of a group multiply and sum up as integers, without rounding. The sum becomes a float, times the group's scale;
groups add up in their order; then comes the scale of the feature, and the bias, all in float32. The result is rounded
once to the type of x.

Weights in blocks (GGUF's Q8_0) have a float16 scale for each `BLOCK` inputs of a feature, and so have rows:

    weight[o, i] = code[o, i] * scale[o, i / BLOCK]    x[t, i] = code[t, i] * scale[t, i / BLOCK]

The sum over a block becomes a float, times the scale of the row's block, times that of the weight's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from winnow.config import ModelConfig

LARGEST = 127
"""Largest value of a code."""
SMALLEST_ROW = 1e-30
"""Rows whose largest number is below this count as zeros: 127 over it would be infinite."""
GROUP = 128
"""Inputs of a row of activations that share a scale."""
BLOCK = 32
"""Inputs of a feature that share a scale where weights are in blocks, and of a row that these multiply."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class WideLayers:
    """Choice of the linear layers that stay wide where those of decoder layers and head are quantized."""

    wide_head: bool = False
    wide_ends: bool = False
    """True: those of the first and the last decoder layer."""

    def of_layer(self, index: int, num_layers: int) -> bool:
        """Return whether the linear layers of a decoder layer are quantized."""
        return not (self.wide_ends and index in (0, num_layers - 1))


@dataclass(frozen=True)
class Int8Weights(WideLayers):
    """Choice of the linear layers that have int8 weights, for CPUs."""

    blocks: bool = False
    """Scales are of blocks of inputs, as in GGUF's Q8_0, not of output features."""

    @classmethod
    def of(cls, config: ModelConfig) -> Self | None:
        """Return the choice as configured; None: no layers have them.

        Raises:
            ConfigError: the form is one for GPUs alone.
        """
        config.check_weight_device("cpu")
        if config.weight_dtype == "auto":
            return None
        wide = config.weight_wide
        return cls("head" in wide, "ends" in wide, blocks=config.weight_dtype == "q8_0")

    @property
    def weight_dtype(self) -> str:
        """The option that asks for them."""
        return "q8_0" if self.blocks else "int8"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Map x [T, n], of floats -> codes int8 [T, n], to the nearest, ties to even, and scales float32 [T].

    A row with a number that is not finite has codes of 0 and a scale that is not a number.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1)
    usable = largest.isfinite()
    # Of tensors: a number over a tensor is the tensor's reciprocal times the number, which rounds twice.
    inverse = torch.where(
        usable & (largest >= SMALLEST_ROW), torch.full_like(largest, LARGEST) / largest, 0.0
    )
    codes = torch.where(usable[:, None], x * inverse[:, None], 0.0).round().to(torch.int8)
    scale = torch.where(largest >= SMALLEST_ROW, largest / LARGEST, 0.0)
    return codes, torch.where(usable, scale, float("nan"))


def quantize_weight(weight: Tensor, *, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Map weight [out_features, in_features] -> codes int8 of its shape, and scales.

    Returns:
        Codes; scales float32 [out_features], or in blocks float16 [out_features, blocks of a feature].
    """
    quantize = quantize_blocks if blocks else quantize_rows
    # A head in float32 can be larger than all the rest.
    parts = [quantize(part) for part in weight.split(_ROWS_AT_ONCE)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Map weight [out_features, in_features] -> codes int8 of its shape, scales float16 [out_features, blocks].

    Blocks whose largest code is 127, as llama.cpp writes them, come out as they are: 127 scales over 127 is the scale.
    """
    out_features, in_features = weight.shape
    rest = -in_features % BLOCK
    x = F.pad(weight.float(), (0, rest)).view(out_features, -1, BLOCK)
    largest = x.abs().amax(dim=-1)
    scale = (largest / LARGEST).clamp(max=torch.finfo(torch.float16).max).half()
    usable = largest.isfinite() & (scale > 0)
    codes = torch.where(usable[..., None], x / scale.float()[..., None], 0.0).round().clamp(-LARGEST, LARGEST)
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    return codes.to(torch.int8).view(out_features, -1)[:, :in_features], scale


def quantize_linears(linears: Sequence[nn.Linear], *, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales, as of `quantize_weight`, of one layer that computes all of these side by side."""
    parts = [_kept(part) or quantize_weight(part.weight.detach(), blocks=blocks) for part in linears]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def keep_blocks(linear: nn.Linear) -> None:
    """Quantize a layer's weight as it is now, for when it will have been rounded to another type."""
    linear.kept_blocks = quantize_weight(linear.weight.detach(), blocks=True)  # type: ignore[assignment]


def _kept(linear: nn.Linear) -> tuple[Tensor, Tensor] | None:
    return getattr(linear, "kept_blocks", None)


def int8_product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [T, in_features] times a quantized weight, transposed, plus the bias: [T, out_features], of the type of
    x.

    Args:
        scale: as `quantize_weight` gives it; its dimensions tell of what.
    """
    out = torch.zeros(len(x), len(codes), device="cpu")
    size = GROUP if scale.ndim == 1 else BLOCK
    parts = zip(x.split(size, dim=1), codes.split(size, dim=1), strict=True)
    for index, (part, own) in enumerate(parts):
        part_codes, part_scale = quantize_rows(part)
        # Exact: a float32 holds every sum of GROUP products.
        product = (part_codes.float() @ own.float().T) * part_scale[:, None]
        out += product if scale.ndim == 1 else product * scale[:, index].float()
    if scale.ndim == 1:
        out = out * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


class Int8Linear(nn.Module):
    """Linear layer of int8 weights, called as `nn.Linear`.

    Args:
        codes: int8 [out_features, in_features].
        scale: as `quantize_weight` gives it.
        bias: [out_features].
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.codes, self.scale = codes, scale
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] -> [..., out_features]."""
        out = int8_product(x.reshape(-1, self.in_features), self.codes, self.scale, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as it is now, [out_features, in_features]."""
        if self.scale.ndim == 1:
            return (self.codes * self.scale[:, None]).to(dtype)
        scale = self.scale.float().repeat_interleave(BLOCK, dim=1)[:, : self.in_features]
        return (self.codes * scale).to(dtype)
