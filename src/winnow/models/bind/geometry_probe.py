"""Geometry of a model's attention layers and states, learnt by watching one token pass through them."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from winnow.attention import AttentionSpec
from winnow.errors import UnsupportedModelError
from winnow.models.bind.binding import (
    ATTENTION_NAME,
    KVLayers,
    LatentHeads,
    attention_of,
    bind_indexers,
    bind_latents,
    cache_argument,
    paged_attention,
)
from winnow.models.bind.captured import CapturedPasses
from winnow.models.bind.mixers import StateProbe, bind_mixers
from winnow.models.model.blocks import stand_ins
from winnow.models.model.geometry import ModelGeometry
from winnow.models.model.kinds import attending_layers, has_states, takes_attention


class Carrier:
    """Holder of the steps of the passes that run, of the model or of a layer by itself; empty between them."""

    def __init__(self) -> None:
        self._steps: list[Any] = []

    def bind(self, model: nn.Module) -> None:
        """Let every part that takes further arguments get the step that the whole was called with."""
        for module in model.modules():
            if _takes_more(module):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = kwargs.get("winnow_step", self._steps[-1] if self._steps else None)
        self._steps.append(step)
        return None if step is None else (args, kwargs | {"winnow_step": step})

    def _leave(self, *_: Any) -> None:
        self._steps.pop()


def _takes_more(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


class _Probe:
    """Stand-in for a step that writes down what each layer hands over."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[tuple[int, int, int]] = []  # by layer: query heads, KV heads, head_dim
        self.windows: list[int | None] = []

    def enter(self, module: nn.Module) -> None:
        """Give a module its number in the cache, in the order in which they attend, and another each further time."""
        number, layer = len(self.modules), getattr(module, "kv_layer", None)
        if module not in self.modules:
            module.kv_layer = number  # type: ignore[assignment]
        elif isinstance(layer, KVLayers):
            layer.numbers.append(number)
        else:
            module.kv_layer = several = KVLayers(int(layer))  # type: ignore[assignment, arg-type]
            several.take()
            several.numbers.append(number)
        self.modules.append(module)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if not q.shape[2] == k.shape[2] == v.shape[2]:  # values of fewer numbers came with zeros behind them
            sizes = f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]}"
            raise UnsupportedModelError(f"the heads of queries, keys and values differ in size: {sizes}")
        self.shapes.append((q.shape[1], k.shape[1], k.shape[2]))
        self.windows.append(spec.window)
        return torch.zeros_like(q)


class _StepLostError(Exception):
    """Signal that keyword arguments of the model's forward do not reach its attention."""


def _probe_attention(
    module: nn.Module, *args: Any, winnow_step: _Probe | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    if winnow_step is None:
        raise _StepLostError("they do not arrive")
    winnow_step.enter(module)
    return paged_attention(module, *args, winnow_step=winnow_step, **kwargs)


# As `winnow.models.bind.binding` registers its own.
_PROBE = "winnow_probe"
AttentionInterface.register(_PROBE, _probe_attention)


def probe_geometry(model: PreTrainedModel) -> ModelGeometry:
    """Run one token through the model. Modules that attend get their numbers in the cache (`kv_layer`), those that keep
    states are bound to packed rows. Raises UnsupportedModelError: the cache cannot hold what its attention needs."""
    geometry, states = _watch(model)
    bind_mixers(states)
    return geometry


def predict_geometry(model: PreTrainedModel) -> ModelGeometry:
    """Return what `probe_geometry` finds of a model on the device "meta", which is of no use afterwards. Raises
    UnsupportedModelError: as `probe_geometry`."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):  # where tokens go, numbers would tell
            module.forward = lambda hidden, *_, **__: hidden
    return _watch(model)[0]


def _watch(model: PreTrainedModel) -> tuple[ModelGeometry, StateProbe]:
    bind_latents(model, (ATTENTION_NAME, _PROBE))
    bind_indexers(model, (ATTENTION_NAME, _PROBE))
    if not takes_attention(type(model)):
        CapturedPasses(model)
    name = type(model).__name__
    config = model.config.get_text_config()
    probe, states = _Probe(), StateProbe(model)
    try:
        try:
            _run(model, probe, states if has_states(config) else None)
        except _StepLostError:
            Carrier().bind(model)
            _run(model, probe, states if has_states(config) else None)
        geometry = _geometry(probe, states, config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model: {name} is not supported: {error}") from None
    except (TypeError, AttributeError, _StepLostError) as error:
        raise UnsupportedModelError(
            f"model: {name} is not supported: its forward does not pass keyword arguments to its attention ({error})"
        ) from error
    for layers in {module.kv_layer for module in probe.modules if isinstance(module.kv_layer, KVLayers)}:
        model.register_forward_pre_hook(layers.restart)
    return geometry, states


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: _Probe, states: StateProbe | None) -> None:
    """Let one token pass, or as many as tell a bias of logits from another."""
    count = 1 if takes_attention(type(model)) else 3
    position = torch.arange(count, device=model.device)[None]
    token = torch.zeros_like(position)
    more: dict[str, Any] = {} if states is None else {cache_argument(model): states}
    watching = nullcontext() if states is None else states.watching()
    more |= {"use_cache": False, "logits_to_keep": position[0], "winnow_step": probe}
    with attention_of(model, _PROBE), stand_ins(model), watching:
        model(input_ids=token, position_ids=position, **more)


def _geometry(probe: _Probe, states: StateProbe, config: PretrainedConfig) -> ModelGeometry:
    num_layers = len(probe.shapes)
    expected = attending_layers(config)
    chunk = getattr(config, "attention_chunk_size", None)
    chunked = [layer for layer, kind in enumerate(expected) if kind == "chunked_attention"]
    if chunked and not chunk:
        raise UnsupportedModelError("it has layers of kind 'chunked_attention'")
    several = any(isinstance(module.kv_layer, KVLayers) for module in probe.modules)
    if (num_layers != len(expected) and not several) or not num_layers:
        raise UnsupportedModelError(f"{num_layers} of its {len(expected)} layers attend through the cache")
    for layer in chunked:  # their masks alone tell it
        probe.modules[layer].kv_chunk = chunk  # type: ignore[assignment]
        probe.windows[layer] = chunk
    query_heads, kv_heads, head_dim = map(max, zip(*probe.shapes, strict=True))
    by_layer = tuple(probe.shapes) if len(set(probe.shapes)) > 1 else ()
    for layer, kind in enumerate(expected if num_layers == len(expected) else ()):
        if "sliding" in kind and probe.windows[layer] is None:
            reason = f"the sliding window of layer {layer} reaches masks only, and none is built"
            raise UnsupportedModelError(reason)
    latent = [isinstance(getattr(module, "kv_b_proj", None), LatentHeads) for module in probe.modules]
    if len(set(latent)) > 1:
        raise UnsupportedModelError("some of its layers attend over latents alone")
    return ModelGeometry(
        *(num_layers, query_heads, kv_heads, head_dim, tuple(probe.windows)),
        states=tuple(states.shapes[key] for key in sorted(states.shapes)),
        by_layer=by_layer,
        latent=any(latent),
        chunked=bool(chunked),
    )
