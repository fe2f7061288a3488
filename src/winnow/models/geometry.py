"""Geometry of a model's attention layers, learnt by watching one token pass through them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelGeometry:
    """The numbers that the cache and the kernels depend on."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer, None where a layer sees everything."""


class _Probe:
    """Stand-in for a step that writes down what each layer hands over."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}  # by layer: query heads, KV heads, head_dim
        self.windows: dict[int, int | None] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if layer in self.shapes:
            raise UnsupportedModelError(
                f"layer {layer} attends twice; Winnow keeps one row per layer and KV head"
            )
        if not q.shape[2] == k.shape[2] == v.shape[2]:
            sizes = f"{q.shape[2]}, {k.shape[2]}, {v.shape[2]}"
            raise UnsupportedModelError(f"the heads of queries, keys and values differ in size: {sizes}")
        self.shapes[layer] = (q.shape[1], k.shape[1], k.shape[2])
        self.windows[layer] = spec.window
        return torch.zeros_like(q)


def probe_geometry(model: "PreTrainedModel") -> ModelGeometry:
    """Run one token through the model and check that its attention is of a kind that the cache can hold.

    Raises:
        UnsupportedModelError: names the model's class and the reason.
    """
    name = type(model).__name__
    _check_config(name, model.config.get_text_config())
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=token,
                position_ids=token,
                use_cache=False,
                logits_to_keep=token[0],
                winnow_step=probe,
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model: {name} is not supported: {error}") from None
    except (TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"model: {name} is not supported: its forward does not pass keyword arguments to its attention ({error})"
        ) from error
    return _geometry(name, probe, model.config.get_text_config())


def _check_config(name: str, config: "PretrainedConfig") -> None:
    """Refuse what a model would say in a mask, since none is built."""
    known = {"full_attention", "sliding_attention"}
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in known:
            raise UnsupportedModelError(f"model: {name} is not supported: it has layers of kind {kind!r}")


def _geometry(name: str, probe: _Probe, config: "PretrainedConfig") -> ModelGeometry:
    num_layers = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"model: {name} is not supported: {len(probe.shapes)} of its {num_layers} layers attend through the cache"
        )
    shapes = set(probe.shapes.values())
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"model: {name} is not supported: its layers differ in heads or head size: {sorted(shapes)}"
        )
    query_heads, kv_heads, head_dim = shapes.pop()
    windows = tuple(probe.windows[layer] for layer in range(num_layers))
    wants_window = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    lost = [layer for layer, wanted in enumerate(wants_window) if wanted and windows[layer] is None]
    if lost:
        raise UnsupportedModelError(
            f"model: {name} is not supported: the sliding window of layer {lost[0]} reaches masks only, and none is "
            "built"
        )
    return ModelGeometry(num_layers, query_heads, kv_heads, head_dim, windows)
