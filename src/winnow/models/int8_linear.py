"""Linear layers of int8 weights in plain torch: what the kernels compute, to the last bit.

A weight has a scale for each output feature, a row of activations one for each group of `GROUP` inputs, taken anew in
every call (W8A8):

    weight[o, i] = code[o, i] * scale[o]        x[t, i] = code[t, i] * scale[t, i / GROUP]        codes from -127 to 127

Codes of a group multiply and sum up as integers, without rounding. The sum becomes a float, times the group's scale;
groups add up in their order; then comes the scale of the feature, and the bias, all in float32. The result is rounded
once to the type of x.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from winnow.config import ModelConfig

LARGEST = 127
"""Of a code."""
SMALLEST_ROW = 1e-30
"""Rows whose largest number is below this count as zeros: 127 over it would be infinite."""
GROUP = 128
"""Inputs of a row of activations that share a scale."""
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Int8Weights:
    """Which linear layers have int8 weights: all of decoder layers and the head, less those that stay wide."""

    wide_head: bool = False
    wide_ends: bool = False
    """Those of the first and the last decoder layer."""

    @classmethod
    def of(cls, config: ModelConfig) -> Self | None:
        """As configured; None: no layers have them."""
        if config.weight_dtype != "int8":
            return None
        return cls("head" in config.weight_wide, "ends" in config.weight_wide)

    def of_layer(self, index: int, num_layers: int) -> bool:
        """Whether the linear layers of a decoder layer are among them."""
        return not (self.wide_ends and index in (0, num_layers - 1))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, n], of floats -> codes int8 [T, n], to the nearest, ties to even, and scales float32 [T].

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


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out_features, in_features] -> codes int8 of its shape, and scales float32 [out_features]."""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for first in range(0, len(weight), _ROWS_AT_ONCE):  # a head in float32 can be larger than all the rest
        last = first + _ROWS_AT_ONCE
        codes[first:last], scale[first:last] = quantize_rows(weight[first:last])
    return codes, scale


def int8_product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in_features] times a quantized weight, transposed, plus the bias: [T, out_features], of the type of x."""
    out = torch.zeros(len(x), len(codes))
    for part, own in zip(x.split(GROUP, dim=1), codes.split(GROUP, dim=1), strict=True):
        part_codes, part_scale = quantize_rows(part)
        # Exact: a float32 holds every sum of GROUP products.
        out += (part_codes.float() @ own.float().T) * part_scale[:, None]
    out = out * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


class Int8Linear(nn.Module):
    """As `nn.Linear`, of a weight that it quantizes.

    Args:
        weight: [out_features, in_features], which is not kept.
        bias: [out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.codes, self.scale = quantize_weight(weight.detach())
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        out = int8_product(x.reshape(-1, self.in_features), self.codes, self.scale, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def rows(self, dtype: torch.dtype) -> Tensor:
        """The weight as it is now, [out_features, in_features]."""
        return (self.codes * self.scale[:, None]).to(dtype)
