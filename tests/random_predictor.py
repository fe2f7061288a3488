"""Predictors that nobody trained, the same ones for each shape: for tests that run every preset on any model."""

from pathlib import Path

import torch

from winnow.config import ModelConfig
from winnow.eviction.predictor import Predictor, predictor_path
from winnow.models import load_model


def random_predictor(num_layers: int, num_heads: int, head_dim: int, hidden: int = 3) -> Predictor:
    """Small random weights, and a probe of zeros, which fits no model."""
    generator = torch.Generator().manual_seed(17)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(num_layers, num_heads, *shape, generator=generator) * 0.2

    width = 2 * head_dim + 2
    probe = torch.zeros(num_layers, num_heads, head_dim)
    return Predictor(draw(), draw(width), draw(width, hidden), draw(hidden), draw(hidden), probe)


def save_random_predictor(model: Path) -> Path:
    """Put a random predictor beside a model, and return the model."""
    loaded = load_model(ModelConfig(model=model, dtype="float32", optimize=False, verify_model=False))
    drawn = random_predictor(*loaded.key_probe.shape)
    Predictor(drawn.offset, drawn.slope, drawn.inner, drawn.inner_bias, drawn.outer, loaded.key_probe).save(
        predictor_path(model)
    )
    return model
