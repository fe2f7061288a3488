"""Watching the hidden state around attention, for policies that ask how much a layer's attention changes it."""

from typing import Any, Protocol

from torch import Tensor, nn

from winnow.errors import UnsupportedModelError
from winnow.models.load.kinds import text_part


class ResidualWatcher(Protocol):
    """A step that wants to see hidden states; `watching` says whether it does."""

    watching: bool

    def enter_layer(self, hidden: Tensor) -> None:
        """Take the hidden state that a layer receives, [1, T, hidden_size]."""

    def leave_attention(self, layer: int, out: Tensor) -> None:
        """Take what the layer's attention adds to it, [1, T, hidden_size]."""


class InputWatcher(Protocol):
    """A step that wants what attention is computed from."""

    wants_inputs: bool

    def enter_attention(self, normed: Tensor) -> None:
        """Take what the attention of a layer receives, [T, hidden_size], before the layer attends."""


def watch_residuals(model: nn.Module, num_layers: int) -> None:
    """Install hooks in the model's layers, so that they call a step that is watching.

    Other steps pay one attribute look-up a layer.

    Fused layers have no parts to hook; they call the step themselves.

    Raises:
        UnsupportedModelError: the layers cannot be identified.
    """
    for layer, attention in _hooked(model, num_layers):
        layer.register_forward_pre_hook(_enter, with_kwargs=True)
        attention.register_forward_hook(_leave, with_kwargs=True)


def watch_attention_inputs(model: nn.Module, num_layers: int) -> None:
    """Install hooks in the model's attention to pass its inputs to a step that wants them.

    Fused layers call the step themselves.

    Raises:
        UnsupportedModelError: the layers cannot be identified.
    """
    for _, attention in _hooked(model, num_layers):
        attention.register_forward_pre_hook(_enter_attention, with_kwargs=True)


def _hooked(model: nn.Module, num_layers: int) -> list[tuple[nn.Module, nn.Module]]:
    """Return the layers that do not call the step themselves, each with its attention."""
    layers = decoder_layers(model, num_layers)
    pairs = [(layer, part) for layer in layers for part in _attentions(layer)]
    calling = sum(getattr(layer, "calls_step", False) for layer in layers)
    if len(pairs) + calling != num_layers:
        raise UnsupportedModelError(
            f"{type(model).__name__}: cannot identify its {num_layers} layers among its modules, so hidden states "
            "cannot be watched"
        )
    return pairs


def decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """Return the model's layers in order, those without attention too; empty if they cannot be identified."""
    config = getattr(model, "config", None)
    depth = num_layers if config is None else config.get_text_config().num_hidden_layers
    for module in (model if config is None else text_part(model)).modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return nn.ModuleList()


def watching(step: Any) -> ResidualWatcher | None:
    """Return the step, if it wants to see hidden states."""
    return step if getattr(step, "watching", False) else None


def input_watcher(step: Any) -> InputWatcher | None:
    """Return the step, if it wants what attention is computed from."""
    return step if getattr(step, "wants_inputs", False) else None


def _attentions(layer: nn.Module) -> list[nn.Module]:
    parts = [part for part in layer.children() if hasattr(part, "layer_idx")]
    return [part for part in parts if attends(part)]


def attends(module: nn.Module) -> bool:
    """Return whether attention is somewhere in a module of transformers' whose geometry is known."""
    return any(hasattr(part, "kv_layer") for part in module.modules())


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if step := watching(kwargs.get("winnow_step")):
        step.enter_layer(args[0] if args else kwargs["hidden_states"])


def _enter_attention(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if step := input_watcher(kwargs.get("winnow_step")):
        step.enter_attention((args[0] if args else kwargs["hidden_states"])[0])


def _leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if step := watching(kwargs.get("winnow_step")):
        layer = next(part.kv_layer for part in module.modules() if hasattr(part, "kv_layer"))
        step.leave_attention(int(layer), output[0] if isinstance(output, tuple) else output)  # type: ignore[arg-type]
