"""Random weights made by repeating a pattern."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.load import checkpoint
from winnow.models.load.checkpoint import RepeatedRandom


def test_large_weights_are_random_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PATTERN", 499)
    torch.manual_seed(0)
    with RepeatedRandom():
        weight = torch.empty(64, 48).normal_(1.0, 0.5)
        small = torch.empty(10, 10).normal_()
        other = torch.empty(64, 48).uniform_(2, 3)
    torch.manual_seed(0)
    assert torch.equal(weight.ravel()[:499], torch.empty(499).normal_(1.0, 0.5))
    assert torch.equal(weight.ravel()[499:998], weight.ravel()[:499])
    assert torch.equal(small, torch.empty(10, 10).normal_())
    assert torch.linalg.matrix_rank(weight) == 48
    assert float(other.min()) >= 2 and float(other.max()) < 3 and len(other.unique()) > 400


def test_a_dummy_model_depends_on_its_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PATTERN", 499)
    LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    ).save_pretrained(tmp_path)

    def weights(seed: int) -> list[torch.Tensor]:
        config = ModelConfig(model=tmp_path, load_format="dummy", optimize=False, seed=seed)
        return [parameter.clone() for parameter in load_model(config).model.parameters()]

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    large = max(first, key=torch.Tensor.numel).ravel()
    assert torch.equal(large[499:998], large[:499]) and len(large.unique()) > 400
    assert any(bool((weight == 1).all()) for weight in first)  # norms are as the model makes them
