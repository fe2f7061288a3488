"""Whether two layers compute the same: the same queries, keys, values and requests to attention, the same output."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from winnow.attention import AttentionSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.models.binding import CausalModel

# Relative to the norm of what is compared. A layer that computes something else is off by far more than rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
INT8_TOLERANCE = 0.1
"""The same where one of the two multiplies numbers of 8 bits."""
_POSITIONS = (0, 1, 2, 7, 50)


@dataclass(frozen=True)
class LayerCall:
    """How the model calls a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module, seed: int = 0) -> "LayerResult":
        """Call a layer this way, on random hidden states."""
        hidden = self.hidden_states
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(hidden.shape, generator=generator).to(hidden.device, hidden.dtype)
        recorder = _Recorder()
        kwargs = {name: value for name, value in self.kwargs.items() if name != "hidden_states"}
        with torch.inference_mode():
            out = layer(rows, *self.args[1:], **kwargs | {"winnow_step": recorder})
        return LayerResult(recorder.calls, out)

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
        """The same call in another number format."""
        return replace(self, args=_cast(self.args, dtype), kwargs=_cast(self.kwargs, dtype))


@dataclass(frozen=True)
class LayerResult:
    """What a layer asked of attention, and what it returned."""

    asked: list[tuple[int, Tensor, Tensor, Tensor, AttentionSpec]]
    out: Any

    @property
    def spec(self) -> AttentionSpec:
        return self.asked[0][4]

    def agrees(self, other: "LayerResult", tolerance: float | None = None) -> bool:
        """Whether both are the same but for rounding; `tolerance` stands in for that of their type."""
        if not isinstance(self.out, Tensor) or not isinstance(other.out, Tensor):
            return False
        if len(self.asked) != 1 or len(other.asked) != 1:
            return False
        if not close(self.out, other.out, tolerance):
            return False
        [(layer, *mine, spec)], [(other_layer, *theirs, other_spec)] = self.asked, other.asked
        return (
            layer == other_layer
            and all(close(a, b, tolerance) for a, b in zip(mine, theirs, strict=True))
            and _same_spec(spec, other_spec)
        )


def record_calls(model: "PreTrainedModel", layers: nn.ModuleList, max_position: int) -> list[LayerCall]:
    """How the model calls each of its layers, on tokens far apart."""
    calls: list[LayerCall] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(args, dict(kwargs)))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run_model(model, max_position, _Recorder())
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@torch.inference_mode()
def run_model(
    model: "CausalModel",
    max_position: int,
    step: Any,
    logits_index: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Logits of random tokens, [1, T, V], or of the one at `logits_index` alone, [1, 1, V].

    Args:
        vocab_size: None: what the model's configuration says.
    """
    last = max_position - 1
    positions = torch.tensor([sorted({min(p, last) for p in (*_POSITIONS, last)})], device=model.device)
    if vocab_size is None:
        vocab_size = cast(Any, model).config.get_text_config().vocab_size
    tokens = torch.randint(vocab_size, positions.shape, generator=torch.Generator().manual_seed(0))
    keep = torch.arange(positions.shape[1]) if logits_index is None else torch.tensor([logits_index])
    logits: Tensor = model(
        input_ids=tokens.to(model.device),
        position_ids=positions,
        use_cache=False,
        logits_to_keep=keep.to(model.device),
        winnow_step=step,
    ).logits
    return logits


def trial_logits(model: "CausalModel", max_position: int, vocab_size: int | None = None) -> Tensor:
    """Logits of random tokens, [1, T, V], to be compared before and after a change to the model."""
    return run_model(model, max_position, _Recorder(), vocab_size=vocab_size)


def selection_is_harmless(model: "PreTrainedModel", max_position: int) -> bool:
    """Whether logits stay the same if the last layer computes only the tokens whose logits are wanted."""
    alone = run_model(model, max_position, _Recorder(torch.tensor([0])), logits_index=0)
    return close(run_model(model, max_position, _Recorder(), logits_index=0), alone)


class _Recorder:
    """Stands in for a step. Its attention mixes queries, keys and values of a token, so that all of them matter."""

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
    """Whether two results are of one kind and the same but for rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    difference = float((a.double() - b.double()).norm())
    tolerance = TOLERANCE[a.dtype] if tolerance is None else tolerance
    return difference <= tolerance * float(b.double().norm())  # False for NaN


def _same_spec(a: AttentionSpec, b: AttentionSpec) -> bool:
    if (a.sinks is None) != (b.sinks is None):
        return False
    sinks = a.sinks is None or torch.equal(a.sinks, b.sinks)  # type: ignore[arg-type]
    return sinks and (a.scale, a.window, a.softcap) == (b.scale, b.window, b.softcap)
