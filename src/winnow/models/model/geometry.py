"""The numbers of a model's attention layers and states. No transformers."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from winnow.cache.recurrent import StateShape


@dataclass(frozen=True)
class ModelGeometry:
    num_layers: int
    """Layers that attend, which have KVs: they are numbered from 0, whatever lies between them."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer, None where a layer sees everything."""
    states: tuple[StateShape, ...] = ()
    by_layer: tuple[tuple[int, int, int], ...] = ()
    """Query heads, KV heads and head_dim of each layer, where they differ: those above are the largest then."""
    latent: bool = False
    """Keys are latents, and values are parts of them (`winnow.models.bind.binding`)."""
    chunked: bool = False
    """Windows begin anew at each of their multiples, as `AttentionSpec.chunked`."""


def decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    """Return the model's layers in order, those without attention too; empty if they cannot be identified."""
    config = getattr(model, "config", None)
    depth, searched = num_layers, model
    if config is not None:  # a packed model has none, and does without transformers
        from winnow.models.model.kinds import text_part

        depth, searched = config.get_text_config().num_hidden_layers, text_part(model)
    for module in searched.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    return nn.ModuleList()
