"""Untrained predictors, the same ones for each shape: for tests that run every preset on any model."""

from dataclasses import replace
from pathlib import Path

import torch

from winnow.config import ModelConfig
from winnow.eviction.predictor import Predictor, predictor_path
from winnow.models import load_model


def random_predictor(
    num_layers: int, num_heads: int, head_dim: int, hidden_size: int, units: int = 3
) -> Predictor:
    """Small random weights that bfloat16 holds, and a probe of zeros, which fits no model."""
    generator = torch.Generator().manual_seed(17)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(num_layers, *shape, generator=generator) * 0.2).bfloat16().float()

    return Predictor(
        draw(num_heads),
        draw(hidden_size + 2 * num_heads, num_heads),
        draw(hidden_size + 2 * num_heads, units),
        draw(units),
        draw(units, num_heads),
        torch.zeros(num_layers, num_heads, head_dim),
    )


def save_random_predictor(model: Path) -> Path:
    """Put a random predictor beside a model, and return the model."""
    loaded = load_model(ModelConfig(model=model, dtype="float32", optimize=False, verify_model=False))
    hidden_size = loaded.model.config.get_text_config().hidden_size
    drawn = random_predictor(*loaded.key_probe.shape, hidden_size)
    replace(drawn, probe=loaded.key_probe).save(predictor_path(model))
    return model
