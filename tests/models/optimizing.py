"""What tests of optimized models share: models bound to attention, and a step that stands in for the engine's."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from torch import Tensor, nn

pytest.importorskip("winnow._native")
from winnow.attention import AttentionSpec
from winnow.models.bind.binding import ATTENTION_NAME
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.optimize import optimize_model
from winnow.models.model.geometry import decoder_layers

FUSED = [
    "llama-gqa",
    "llama-mqa",
    "llama-mha",
    "mistral-window",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3",
]
MAX_POSITION = 512


class Step:
    """Attention of a token with itself, which is enough to tell layers apart."""

    def __init__(self, logits_indices: Tensor | None = None) -> None:
        self.logits_indices = logits_indices
        self.specs: list[AttentionSpec] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert layer == len(self.specs)
        self.specs.append(spec)
        return q * spec.scale + (k * v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def bound(architecture: str, dtype: torch.dtype, num_layers: int | None = None) -> Any:
    """The model, or its first layers."""
    config = deepcopy(ARCHITECTURES[architecture])
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    model = build(config).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    probe_geometry(model)  # modules that attend get their numbers
    return model


def optimized(model: Any) -> Any:
    optimize_model(model, probe_geometry(model), MAX_POSITION)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    return list(decoder_layers(model, model.config.num_hidden_layers))
