"""Construction of a fused layer from transformers' own, if the two compute the same."""

from copy import deepcopy
from inspect import signature

import torch
from torch import Tensor, nn

from winnow.attention import AttentionSpec
from winnow.models.fast.fused.layer import FusedFeedForward, FusedLayer, FusedNorm, LayerPasses
from winnow.models.fast.fused.parts import FeedForwardParts, LayerParts, read_norm
from winnow.models.fast.fused.probe import ROUNDED_TOLERANCE, LayerCall
from winnow.models.fast.packed_linear import MakeLinear


class _SideBySide(nn.Module):
    """Products that one fused product replaces, as the layers are: to probe without a copy of their weights."""

    def __init__(self, linears: tuple[nn.Linear, ...]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.linears], dim=-1)


@torch.inference_mode()
def fuse_layer(
    layer: nn.Module,
    call: LayerCall,
    shape: tuple[int, int, int],
    kernels: LayerPasses,
    make_linear: MakeLinear,
    *,
    rounds: bool = False,
) -> FusedLayer | str:
    """Return the fused form of a decoder layer, or, if it would compute something else, the reason why there is none.

    Compared twice: in float32, where any difference beyond rounding shows, and as it will run.

    Args:
        call: how the model calls the layer.
        shape: query heads, KV heads and head_dim.
        make_linear: of its products.
        rounds: their weights are rounded further than the layer's.
    """
    parts = LayerParts.of(layer, *shape)
    rotation = call.rotation
    if parts is None:
        return "its parts are not those of Llama's layers"
    if rotation is None or rotation[0].shape[2] > shape[2]:
        return "its positions are not rotations of all its heads"
    try:
        if rounds or call.hidden_states.dtype != torch.float32:
            reason = _difference_in_float32(layer, call, shape, kernels)
            if reason is not None:
                return f"{reason}, in float32"
    except (RuntimeError, TypeError):  # the layer insists on its own number format
        return "it cannot be tried in float32"
    expected = call.run(layer)
    products = {name: make_linear(linears) for name, linears in _linears(parts).items()}
    fused = _fused(layer, parts, products, expected.spec, shape, kernels)
    reason = call.run(fused).difference(expected, ROUNDED_TOLERANCE if rounds else None)
    return fused if reason is None else reason


def fuse_parts(
    layer: nn.Module, kernels: LayerPasses, make_linear: MakeLinear
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Replace norms, and feed-forward parts, of a layer that has no fused form. Returns what `put_back` takes."""
    replaced = []
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            made = _fused_norm(child, kernels)
            parts = FeedForwardParts.of(child) if parent is layer else None
            if parts is not None:
                gate_up, down = make_linear(parts.gate_up), make_linear([parts.down])
                made = FusedFeedForward(gate_up, down, parts.activation, kernels)
            if made is not None:
                setattr(parent, name, made)
                replaced.append((parent, name, child))
    return replaced


def _fused_norm(module: nn.Module, kernels: LayerPasses) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or len(signature(module.forward).parameters) != 1:
        return None
    norm = read_norm(module, len(weight))
    return None if norm is None else FusedNorm(norm, kernels)


def _difference_in_float32(
    layer: nn.Module, call: LayerCall, shape: tuple[int, int, int], kernels: LayerPasses
) -> str | None:
    copy, call = deepcopy(layer).float(), call.to(torch.float32)
    parts = LayerParts.of(copy, *shape)
    if parts is None:
        return "it has other parts"
    expected = call.run(copy)
    products: dict[str, nn.Module] = {name: _SideBySide(linears) for name, linears in _linears(parts).items()}
    fused = _fused(copy, parts, products, expected.spec, shape, kernels)
    return call.run(fused).difference(expected)


def _fused(
    layer: nn.Module,
    parts: LayerParts,
    products: dict[str, nn.Module],
    spec: AttentionSpec,
    shape: tuple[int, int, int],
    kernels: LayerPasses,
) -> FusedLayer:
    index = int(layer.self_attn.kv_layer)  # type: ignore[arg-type, union-attr]
    public = {n: v for n, v in vars(layer).items() if not n.startswith("_") and n != "training"}
    return FusedLayer(index, parts.norms, parts.activation, products, spec, shape, kernels, public)


def _linears(parts: LayerParts) -> dict[str, tuple[nn.Linear, ...]]:
    return {"qkv": parts.qkv, "output": (parts.output,), "gate_up": parts.gate_up, "down": (parts.down,)}
