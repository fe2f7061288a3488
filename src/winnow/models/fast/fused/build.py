"""Construction of a fused layer from transformers' own, if the two compute the same.

They must ask the same of attention, with the same queries, keys and values, and give the same output. Each is tried on
random hidden states and on those that the model's own code gives it: a trained model's residual stream may be a
thousand times as large, and what is wrong there can be right in small numbers.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from winnow.attention import AttentionSpec
from winnow.models.bind.binding import attention_of
from winnow.models.fast.fused.layer import FusedFeedForward, FusedLayer, FusedNorm
from winnow.models.fast.fused.parts import FeedForwardParts, LayerParts, read_norm
from winnow.models.fast.packed_linear import MakeLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.models.fast.fused.layer import LayerPasses

# Relative to the norm of what is compared, as the root mean square over tokens. A layer that computes something else is
# off by far more than rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
ROUNDED_TOLERANCE = 0.3
"""The same where one of the two has weights of 8 bits and the other has not: what a layer adds to its own hidden
states is off by .1 where few activations are large."""
INTEGERS_TOLERANCE = 1e-3
"""The same where one of the two multiplies weights in blocks with activations of 16 bits, and all else is float32."""
_POSITIONS = (0, 1, 2, 7, 50)


@dataclass(frozen=True)
class LayerCall:
    """Arguments with which the model calls a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: Tensor  # hidden states that the model's own code gives the layer, [1, T, hidden_size]

    def run(self, layer: nn.Module) -> "LayerResult":
        random = torch.randn(self.states.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        kwargs = {name: value for name, value in self.kwargs.items() if name != "hidden_states"}
        tried = []
        with torch.inference_mode():
            for name, rows in (("random hidden states", random), ("the model's own", self.states)):
                rows, recorder = rows.to(self.hidden_states), _Recorder()
                out = layer(rows.clone(), *self.args[1:], **kwargs | {"winnow_step": recorder})
                tried.append(Tried(name, rows, recorder.calls, out))
        return LayerResult(tuple(tried))

    @property
    def hidden_states(self) -> Tensor:
        found = self.args[0] if self.args else self.kwargs["hidden_states"]
        assert isinstance(found, Tensor), "a layer is called with hidden states first"
        return found

    @property
    def rotation(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [1, T, rotary_dim] each of the hidden states' type; None: the layer gets no such thing."""
        hidden, found = self.hidden_states, self.kwargs.get("position_embeddings")
        if not isinstance(found, tuple) or len(found) != 2:
            return None
        cos, sin = found
        alike = cos.dtype == sin.dtype == hidden.dtype and cos.shape == sin.shape and cos.is_contiguous()
        if not alike or cos.ndim != 3 or cos.shape[:2] != hidden.shape[:2] or cos.shape[2] % 2:
            return None
        return cos, sin

    def to(self, dtype: torch.dtype) -> "LayerCall":
        return LayerCall(_cast(self.args, dtype), _cast(self.kwargs, dtype), self.states.to(dtype))


@dataclass(frozen=True)
class Tried:
    """Record of what a layer asked of attention and returned for hidden states [1, T, hidden_size]."""

    name: str
    hidden: Tensor
    asked: list[tuple[int, Tensor, Tensor, Tensor, AttentionSpec]]
    out: Any

    def difference(self, other: "Tried", tolerance: float | None) -> str | None:
        if not isinstance(self.out, Tensor) or not isinstance(other.out, Tensor):
            return "it returns more than hidden states"
        if len(self.asked) > 1 or len(other.asked) != len(self.asked):
            return "it does not attend once"
        for (layer, *mine, spec), (number, *theirs, its) in zip(self.asked, other.asked, strict=True):
            if layer != number or not _same_spec(spec, its):
                return "it asks something else of attention"
            for name, a, b in zip(("queries", "keys", "values"), mine, theirs, strict=True):
                if not close(a, b, tolerance):
                    return f"other {name} on {self.name}"
        if not _same_addition(self.hidden, self.out, other.out, tolerance):
            return f"another output on {self.name}"
        return None


@dataclass(frozen=True)
class LayerResult:
    tried: tuple[Tried, ...]

    @property
    def spec(self) -> AttentionSpec:
        return self.tried[0].asked[0][4]

    def difference(self, other: "LayerResult", tolerance: float | None = None) -> str | None:
        found = (a.difference(b, tolerance) for a, b in zip(self.tried, other.tried, strict=True))
        return next((each for each in found if each is not None), None)


def record_calls(model: "PreTrainedModel", layers: nn.ModuleList, max_position: int) -> list[LayerCall]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, dict(kwargs)))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run_model(model, max_position, _Recorder())
        ours, calls = calls, []
        with attention_of(model, "eager"):
            run_model(model, max_position, _Recorder())
    finally:
        for hook in hooks:
            hook.remove()
    own = [args[0] if args else kwargs["hidden_states"] for args, kwargs in calls]
    return [LayerCall(*call, states) for call, states in zip(ours, own, strict=True)]


@torch.inference_mode()
def run_model(
    model: Any, max_position: int, step: Any, logits_index: int | None = None, vocab_size: int | None = None
) -> Tensor:
    """Return logits of random tokens, [1, T, V], or of the one at `logits_index` alone, [1, 1, V]. `vocab_size` None is
    what the model's configuration says."""
    last = max_position - 1
    positions = torch.tensor([sorted({min(p, last) for p in (*_POSITIONS, last)})], device=model.device)
    if vocab_size is None:
        vocab_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, positions.shape, generator=generator, device="cpu").to(model.device)
    keep = torch.arange(positions.shape[1], device=model.device)
    options = {
        "use_cache": False,
        "logits_to_keep": keep if logits_index is None else keep[[logits_index]],
        "winnow_step": step,
    }
    logits: Tensor = model(input_ids=tokens, position_ids=positions, **options).logits
    return logits


def trial_logits(model: Any, max_position: int, vocab_size: int | None = None) -> Tensor:
    """Return logits of random tokens, [1, T, V], to be compared before and after a change to the model."""
    return run_model(model, max_position, _Recorder(), vocab_size=vocab_size)


def selection_is_harmless(model: "PreTrainedModel", max_position: int) -> bool:
    """Return whether logits stay the same if the last layer computes only the tokens whose logits are wanted."""
    alone = run_model(model, max_position, _Recorder(torch.tensor([0], device="cpu")), logits_index=0)
    return close(run_model(model, max_position, _Recorder(), logits_index=0), alone)


class _Recorder:
    """Stand-in for a step. Its attention mixes queries, keys and values of a token, so that all of them matter."""

    def __init__(self, logits_indices: Tensor | None = None) -> None:
        self.calls: list[tuple[int, Tensor, Tensor, Tensor, AttentionSpec]] = []
        self.logits_indices = logits_indices

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.calls.append((layer, q.clone(), k.clone(), v.clone(), spec))
        group = q.shape[1] // k.shape[1]
        return 0.5 * q + (torch.tanh(k) * v).repeat_interleave(group, dim=1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    if isinstance(value, dict):
        return {name: _cast(part, dtype) for name, part in value.items()}
    return value


def close(a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
    """Return whether two results, [..., T, size], are of one kind and the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return _within((a.double() - b.double()).norm(dim=-1), b.double(), a.dtype, tolerance)


def _same_addition(hidden: Tensor, a: Tensor, b: Tensor, tolerance: float | None) -> bool:
    """Return whether two additions to hidden states are the same; both are rounded with a large residual stream."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    magnitude = torch.maximum(hidden.double().abs(), b.double().abs())
    # Two additions, each rounded in both.
    difference = (a.double() - b.double()).abs() - 2 * torch.finfo(a.dtype).eps * magnitude
    # NaN stays NaN.
    return _within(difference.clamp_min(0).norm(dim=-1), b.double() - hidden.double(), a.dtype, tolerance)


def _within(errors: Tensor, expected: Tensor, dtype: torch.dtype, tolerance: float | None) -> bool:
    """Return whether errors of tokens, [..., T], are rounding beside what was expected, [..., T, size]. All tokens
    count alike: the first of a text may be a thousand times as large as others."""
    parts = errors / expected.norm(dim=-1).clamp_min(1e-30)
    if tolerance is None:
        return float(parts.pow(2).mean().sqrt()) <= TOLERANCE[dtype]  # False for NaN
    # A token with an outlier loses more than others to 8 bits.
    return float(parts.median()) <= tolerance


def _same_spec(a: AttentionSpec, b: AttentionSpec) -> bool:
    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return torch.equal(x, y) if x is not None and y is not None else x is y

    if not (equal(a.sinks, b.sinks) and equal(a.slopes, b.slopes)):
        return False
    return replace(a, sinks=None, slopes=None) == replace(b, sinks=None, slopes=None)


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
    kernels: "LayerPasses",
    make_linear: MakeLinear,
    *,
    tolerance: float | None = None,
) -> FusedLayer | str:
    """Return the fused form of a decoder layer, or, if it would compute something else, the reason why there is none.

    Compared twice: in float32, where any difference beyond rounding shows, and as it will run.

    Args:
        shape: query heads, KV heads and head_dim.
        tolerance: of products that are rounded further than the layer's; None: they are not.
    """
    parts = LayerParts.of(layer, *shape)
    rotation = call.rotation
    if parts is None:
        return "its parts are not those of Llama's layers"
    if rotation is None or rotation[0].shape[2] > shape[2]:
        return "its positions are not rotations of all its heads"
    try:
        if tolerance is not None or call.hidden_states.dtype != torch.float32:
            reason = _difference_in_float32(layer, call, shape, kernels)
            if reason is not None:
                return f"{reason}, in float32"
    except (RuntimeError, TypeError):  # the layer insists on its own number format
        return "it cannot be tried in float32"
    expected = call.run(layer)
    products = {name: make_linear(linears) for name, linears in _linears(parts).items()}
    fused = _fused(layer, parts, products, expected.spec, shape, kernels)
    reason = call.run(fused).difference(expected, tolerance)
    return fused if reason is None else reason


def fuse_parts(
    layer: nn.Module, kernels: "LayerPasses", make_linear: MakeLinear
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


def _fused_norm(module: nn.Module, kernels: "LayerPasses") -> nn.Module | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or len(signature(module.forward).parameters) != 1:
        return None
    norm = read_norm(module, len(weight))
    return None if norm is None else FusedNorm(norm, kernels)


def _difference_in_float32(
    layer: nn.Module, call: LayerCall, shape: tuple[int, int, int], kernels: "LayerPasses"
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
    kernels: "LayerPasses",
) -> FusedLayer:
    index = int(layer.self_attn.kv_layer)  # type: ignore[arg-type, union-attr]
    public = {n: v for n, v in vars(layer).items() if not n.startswith("_") and n != "training"}
    return FusedLayer(index, parts.norms, parts.activation, products, spec, shape, kernels, public)


def _linears(parts: LayerParts) -> dict[str, tuple[nn.Linear, ...]]:
    return {"qkv": parts.qkv, "output": (parts.output,), "gate_up": parts.gate_up, "down": (parts.down,)}
