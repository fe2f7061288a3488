"""The parts of a decoder layer that is built like Llama's, found by name and identified by what they compute."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from winnow.process import native

if TYPE_CHECKING:
    from winnow.process.native import RmsNorm


class Activation(Enum):
    """The function of a gate; its names are the native kernels' too."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"


class NormWeight:
    """The weight of a root-mean-square norm, [size], dense. With `one_plus` rows are multiplied by 1 + it (Gemma)."""

    def __init__(self, weight: Tensor, eps: float, *, one_plus: bool = False) -> None:
        assert weight.is_contiguous(), "a kernel reads the weight as one dense row"
        self.weight = weight  # what `native` points at
        self.eps, self.one_plus = eps, one_plus

    @cached_property
    def native(self) -> "RmsNorm":
        """The norm as the native kernels take it; a GPU needs none, nor the extension."""
        return native.RmsNorm(self.weight.data_ptr(), self.eps, self.one_plus)


_CLOSE = 1e-5


@dataclass(frozen=True)
class LayerNorms:
    input: NormWeight
    post: NormWeight
    """Before the feed-forward part."""
    query: NormWeight | None = None
    """Norm of each head; None: heads have no norm."""
    key: NormWeight | None = None
    output: NormWeight | None = None
    """Norm of what attention adds to the layer's input (Gemma 2); None: it is added as it is."""
    down: NormWeight | None = None
    """Norm of what the feed-forward part adds."""


@dataclass(frozen=True)
class LayerParts:
    """norm - queries, keys, values - (norms of heads) - attention - output - (norm) -, norm - gate, up - down - (norm).

    Names alone prove nothing: whether a layer of these parts computes what the whole does is tried out in `fuse_layer`.
    """

    norms: LayerNorms
    qkv: tuple[nn.Linear, ...]  # three layers, or one that holds all
    output: nn.Linear
    gate_up: tuple[nn.Linear, ...]  # two layers, or one that holds both
    down: nn.Linear
    activation: Activation

    @classmethod
    def of(
        cls, layer: nn.Module, num_query_heads: int, num_kv_heads: int, head_dim: int
    ) -> "LayerParts | None":
        attention, own = getattr(layer, "self_attn", None), FeedForwardParts.of(getattr(layer, "mlp", None))
        qkv = _linears(attention, ("qkv_proj",)) or _linears(attention, ("q_proj", "k_proj", "v_proj"))
        output = _linears(attention, ("o_proj",))
        if not (qkv and own and output):
            return None
        gate_up, down = own.gate_up, own.down
        hidden_size, inner = down.out_features, down.in_features
        sizes = [
            (_width(qkv), (num_query_heads + 2 * num_kv_heads) * head_dim),
            (_width(gate_up), 2 * inner),
            (output[0].in_features, num_query_heads * head_dim),
            (output[0].out_features, hidden_size),
            *((part.in_features, hidden_size) for part in (*qkv, *gate_up)),
        ]
        names = {"input": "input_layernorm", "post": "post_attention_layernorm"}
        if hasattr(layer, "pre_feedforward_layernorm"):
            # Then the other is what its name says, after attention.
            names |= {"output": names["post"], "post": "pre_feedforward_layernorm"}
            names["down"] = "post_feedforward_layernorm"
        norms = {place: read_norm(getattr(layer, name, None), hidden_size) for place, name in names.items()}
        if any(found != wanted for found, wanted in sizes) or None in norms.values():
            return None
        for place, name in (("query", "q_norm"), ("key", "k_norm")):
            norms[place] = read_norm(getattr(attention, name, None), head_dim)
        return cls(LayerNorms(**norms), qkv, output[0], gate_up, down, own.activation)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FeedForwardParts:
    """gate, up - activation - down, under the names of some models."""

    gate_up: tuple[nn.Linear, ...]  # two layers, or one that holds both
    down: nn.Linear
    activation: Activation

    @classmethod
    def of(cls, module: nn.Module | None) -> "FeedForwardParts | None":
        gate_up = None
        for names in (("gate_up_proj",), ("gate_proj", "up_proj"), ("input_linear",)):
            gate_up = gate_up or _linears(module, names)
        down = _linears(module, ("down_proj",)) or _linears(module, ("output_linear",))
        named = [getattr(module, name, None) for name in ("act_fn", "activation_fn", "activation")]
        activation = _activation(next((each for each in named if callable(each)), None))
        if not (gate_up and down and activation is not None):
            return None
        return cls(gate_up, down[0], activation)


def _linears(parent: nn.Module | None, names: tuple[str, ...]) -> tuple[nn.Linear, ...] | None:
    found = [getattr(parent, name, None) for name in names]
    return tuple(found) if all(type(part) is nn.Linear for part in found) else None  # type: ignore[arg-type]


def _width(linears: tuple[nn.Linear, ...]) -> int:
    return sum(part.out_features for part in linears)


@torch.inference_mode()
def read_norm(module: nn.Module | None, size: int) -> NormWeight | None:
    """Return the norm that a module computes, tried out on random rows; None: another one, or none at all."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    fits = isinstance(weight, Tensor) and weight.shape == (size,)
    if module is None or not fits or not isinstance(eps, float):
        return None
    # Rows so small that eps matters, in the weight's own type.
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(0), device="cpu")
    x = (x * torch.tensor([[1e-3], [0.1], [1], [30]], device="cpu")).to(weight)
    found = module(x).double()
    normed = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps)
    # The nearer of both: of a large weight, one more is less than the rounding that is allowed. By feature: a large
    # weight of one would hide the error of others.
    kind, errors = torch.finfo(weight.dtype), []
    for one_plus in (False, True):
        expected = normed * (weight.double() + one_plus)
        of_features = (found - expected).norm(dim=0) / expected.norm(dim=0).clamp_min(kind.smallest_normal)
        errors.append((float(of_features.max()), one_plus))
    error, one_plus = min(errors)
    return NormWeight(weight.detach(), eps, one_plus=one_plus) if error < max(_CLOSE, 4 * kind.eps) else None


@torch.inference_mode()
def _activation(module: Callable[[Tensor], Tensor] | None) -> Activation | None:
    if module is None:
        return None
    x = torch.linspace(-8, 8, 321, device="cpu")
    found = module(x)
    if _relative_error(found, F.silu(x)) < _CLOSE:
        return Activation.silu
    if _relative_error(found, F.gelu(x, approximate="tanh")) < _CLOSE:
        return Activation.gelu_tanh
    return None


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
