"""A model of one dtype over KVs of another: layers get activations back, and logits hardly change."""

from pathlib import Path

import pytest
import torch
from tests.extension import needs_extension
from tiny_llama import VOCAB, save_tiny_llama

from winnow.attention import open_backend
from winnow.cache import CacheLayout
from winnow.config import ModelConfig
from winnow.models import load_model
from winnow.models.load import paged_trial

BACKENDS = ["reference", pytest.param("native", marks=needs_extension), "triton"]
# Largest difference of a token's logits, as a part of their norm: rounding to bfloat16 does less.
ROUNDED = 0.1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), seed=2)


def logits(
    directory: Path, dtype: str, kv_format: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """float32 [T, V], of a prompt in one chunk and a token by itself."""
    monkeypatch.undo()  # of an earlier call
    even = CacheLayout.even

    def layout(
        layers: int, heads: int, dim: int, block_size: int, _: torch.dtype, *rest: int, **others: object
    ) -> CacheLayout:
        return even(layers, heads, dim, block_size, kv_format, *rest, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(paged_trial.CacheLayout, "even", layout)
    loaded = load_model(ModelConfig(model=directory, dtype=dtype, device="cpu", verify_model=False))
    tokens = torch.randint(VOCAB, (18,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return paged_trial.paged_logits(
            loaded, tokens, open_backend(backend, "cpu"), paged_trial.plain_layout(loaded)
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "kv_format"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_model_over_kvs_of_another_dtype(
    dtype: str, kv_format: str, backend: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = logits(directory, "float32", "float32", "reference", monkeypatch)
    mixed = logits(directory, dtype, kv_format, backend, monkeypatch)
    differs = (mixed - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < float(differs.max()) < ROUNDED
