"""What tests of optimized models share: models bound to attention, and a step that stands in for the engine's."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from torch import Tensor, nn

pytest.importorskip("winnow._native")
from winnow.attention import AttentionSpec
from winnow.models.bind.binding import ATTENTION_NAME
from winnow.models.bind.geometry import decoder_layers
from winnow.models.bind.geometry_probe import probe_geometry
from winnow.models.fast.fused.kernels import LayerKernels
from winnow.models.fast.optimize import optimize_model
from winnow.models.fast.packed_linear import (
    one_dnn_works,
)

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


def bound(architecture: str, dtype: torch.dtype) -> Any:
    model = build(ARCHITECTURES[architecture]).to(dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    probe_geometry(model)  # modules that attend get their numbers
    return model


def optimized(model: Any) -> Any:
    optimize_model(model, probe_geometry(model), MAX_POSITION)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    return list(decoder_layers(model, model.config.num_hidden_layers))


@pytest.fixture(params=[False, True], ids=["vector-units", "matrix-units"])
def matrix_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor has AMX and the kernels do without; oneDNN computes on every processor."""
    monkeypatch.setattr(LayerKernels, "beside_matrix_units", request.param)
    return bool(request.param)


def is_one_dnns(dtype: torch.dtype, matrix_units: bool) -> bool:
    """Whether linear layers are expected to be oneDNN's, so that nothing is left for the kernels' own forms."""
    return dtype == torch.bfloat16 and matrix_units and one_dnn_works()
