"""Linear layers of 8 and 4 bits on GPUs, whose weights and products are those of humming (package humming-kernels).

Blocks of a checkpoint become humming's tensors with the codes and scales that they have. humming holds

    integers, scale * (code - zero), with a scale of the model's dtype and a zero for each group of inputs of a feature
    E4M3, scale * code, with a scale in float32 for each tile of 128 times 128, or of the model's dtype for each feature

codes one behind the other in words of 32 bits, the lowest bits first. What does not fit exactly stays in 16 bits: kinds
whose scales are products (Q4_K), minima that are no whole number of scales (Q4_1 of GGUF files), and scales of float16
in a model of bfloat16 that rounds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from winnow.config import ModelConfig
from winnow.errors import ConfigError
from winnow.models.fast.packed_linear import join_biases, join_linears, join_weights
from winnow.models.model.blocks import BLOCK, RAW, Blocks, LibraryLayers, own_blocks

_CAPABILITIES = {torch.bfloat16: (8, 0), torch.float16: (7, 5)}
"""Least compute capability by dtype."""
_FP8_PRODUCTS = (8, 9)
"""The one from which on activations of E4M3 are multiplied as such."""
_GROUP = 128
"""Most inputs of a feature that share a scale and a zero; features and inputs of a tile."""
_PANEL = (128, 64)
"""Features and inputs of a weight are multiples of these: the tile of Hopper's products."""
_FORMS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "fp8": {"dtype": "float8e4m3"},
    "int4": {"dtype": "uint4", "group_size": _GROUP, "has_zero_point": True},
}
"""What weights of 16 bits are quantized to, as humming names it: a scale for each feature, or for each group."""


@dataclass(frozen=True)
class LibraryWeights(LibraryLayers):
    """Choice of the linear layers that humming multiplies: decoder layers and head, less those that stay wide, a head
    that shares its weight with the embedding, and what a form does not hold."""

    weight_dtype: str = "int8"
    """auto: blocks of the checkpoint; else what weights are quantized to, fp8 with activations of 8 bits where the
    device multiplies them."""

    @classmethod
    def of(
        cls, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, kept: bool = False
    ) -> Self | None:
        """Return the choice as configured; None: no layers have them. Blocks of the checkpoint stay as they are, if
        `kept`, where nothing else is configured. Raises ConfigError: humming is not installed, or the device or another
        option has no such products."""
        form = config.weight_dtype
        if form == "auto":
            return cls(weight_dtype=form) if kept and dtype in _CAPABILITIES else None
        if not config.optimize:
            raise ConfigError(f"weight_dtype {form} on {device} needs optimize, got False")
        if dtype not in _CAPABILITIES:
            found = str(dtype).removeprefix("torch.")
            raise ConfigError(f"weight_dtype {form} needs dtype bfloat16 or float16, got {found}")
        if _capability(device) < _CAPABILITIES[dtype]:
            needed, found = (f"{a}.{b}" for a, b in (_CAPABILITIES[dtype], _capability(device)))
            raise ConfigError(
                f"weight_dtype {form} needs compute capability {needed}, and {device} has {found}"
            )
        return cls(form)

    @classmethod
    def holds_codes(cls, config: ModelConfig, device: torch.device) -> bool:
        """Return whether linear layers keep blocks of a checkpoint, unless its dtype turns out to be float32."""
        fits = device.type == "cuda" and _capability(device) >= _CAPABILITIES[torch.bfloat16]
        return fits and config.weight_dtype == "auto"

    def join(self, linears: Sequence[nn.Linear]) -> nn.Module:
        """Return one product in place of several of the same input, which stay as they are."""
        if self.weight_dtype == "auto":
            held = _held(linears)
            if held is not None:
                return HummingLinear(linears, *held)
            return linears[0] if len(linears) == 1 else join_linears(linears)
        features, inputs = sum(each.out_features for each in linears), linears[0].in_features
        form = _FORMS[self.weight_dtype]
        if features % _PANEL[0] or inputs % form.get("group_size", _PANEL[1]):
            return join_linears(linears)
        narrow = self.weight_dtype == "fp8" and _capability(linears[0].weight.device) >= _FP8_PRODUCTS
        return HummingLinear(linears, form, activations={"dtype": "float8e4m3"} if narrow else None)


class HummingLinear(nn.Module):
    """x @ weight.T + bias, as `nn.Linear`, of several such layers side by side, by humming.

    Args:
        form: of the weight, as humming names it.
        tensors: humming's of the weight; None: those of the layers are quantized.
        activations: form that they are rounded to; None: they stay as they are.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        form: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        activations: Mapping[str, Any] | None = None,
    ) -> None:
        from humming.layer import HummingLayer

        super().__init__()
        self.out_features = sum(each.out_features for each in linears)
        self.in_features, like, bias = linears[0].in_features, linears[0].weight, join_biases(linears)
        options = {"has_bias": bias is not None, "torch_dtype": like.dtype}
        layer = HummingLayer(
            self.out_features, self.in_features, dict(form), dict(activations or {}), **options
        )
        self.layer = layer.to(like.device)
        if tensors is None:
            self.layer.load_from_unquantized(join_weights(linears))
        else:
            self.layer.load_from_tensors(tensors)
        if bias is not None:
            self.layer.load_from_tensors({"bias": bias})
        self.layer.transform()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] -> [..., out_features]."""
        out: Tensor = self.layer(x.reshape(-1, self.in_features).contiguous())
        return out.view(*x.shape[:-1], self.out_features)


def _held(linears: Sequence[nn.Linear]) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    like, found = linears[0].weight, [own_blocks(each) for each in linears]
    parts = [own for own in found if own is not None]
    if len(parts) < len(found) or len({own.kind for own in parts}) > 1:
        return None
    data = torch.cat([own.data.to(like.device) for own in parts])
    return humming_tensors(Blocks(parts[0].kind, data), like.dtype)


def humming_tensors(blocks: Blocks, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return the form of a weight in blocks as humming names it, and its tensors, with scales of the model's dtype.
    None: it does not hold it exactly."""
    features, inputs = blocks.shape
    if blocks.kind not in ("Q4_0", "Q4_1", "Q8_0", "F8_E4M3") or features % _PANEL[0] or inputs % _PANEL[1]:
        return None
    raw = blocks.data.view(features, -1, RAW[blocks.kind][1])
    if blocks.kind == "F8_E4M3":
        return _of_floats(raw[..., :4].contiguous().view(torch.float32)[..., 0], raw[..., 4:], dtype)
    start = 4 if blocks.kind == "Q4_1" else 2
    head, stored = raw[..., :start].contiguous().view(torch.float16).float(), raw[..., start:]
    scale = head[..., 0]
    zero = torch.zeros_like(scale)
    if blocks.kind == "Q4_1":
        zero = (-head[..., 1] / scale).round().nan_to_num().clamp(0, 15)
        if not (-scale * zero).half().float().equal(head[..., 1]):
            return None
    group = BLOCK
    while group < _GROUP and scale.shape[1] % 2 == 0:
        pairs = [each.view(features, -1, 2) for each in (scale, zero)]
        if not all(each[..., 0].equal(each[..., 1]) for each in pairs):
            break
        scale, zero = (each[..., 0] for each in pairs)
        group *= 2
    if not scale.to(dtype).float().equal(scale):
        return None
    form: dict[str, Any]
    tensors = {"weight_scale": scale.to(dtype)}
    if blocks.kind == "Q8_0":
        form, words = {"dtype": "uint8"}, stored ^ 128
    else:
        form, words = {"dtype": "uint4"}, _pack(torch.cat([stored & 15, stored >> 4], dim=-1))
    if blocks.kind == "Q4_1":
        form["has_zero_point"] = True
        tensors["zero_point"] = _pack(zero.T.to(torch.uint8).contiguous()).view(torch.int32).T.contiguous()
    return form | {"group_size": group}, tensors | {"weight": words.flatten(1).view(torch.int32)}


def _of_floats(
    scale: Tensor, codes: Tensor, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    form: dict[str, Any] = {"dtype": "float8e4m3"}
    tensors = {"weight": codes.flatten(1).view(torch.int32)}
    features, blocks = scale.shape
    each = _GROUP // BLOCK
    if features % _GROUP == 0 and blocks % each == 0:
        tiles = scale.view(features // _GROUP, _GROUP, -1, each)
        if tiles.equal(tiles[:, :1, :, :1].expand_as(tiles)):
            sizes = {"group_size": _GROUP, "group_size_n": _GROUP}
            return form | sizes, tensors | {"weight_scale": tiles[:, 0, :, 0].contiguous()}
    of_features = scale[:, :1]
    if not scale.equal(of_features.to(dtype).float().expand_as(scale)):
        return None
    return form, tensors | {"weight_scale": of_features.to(dtype)}


def _pack(codes: Tensor) -> Tensor:
    """Return codes of 4 bits two to a byte, along the last dimension."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
