"""Llama 4: layers that attend within chunks, and queries scaled by position in those that attend over everything."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import _COMMON, VOCAB, generate_alone, save
from transformers import Llama4TextConfig

from winnow import LLM, SamplingParams
from winnow.attention import AttentionSpec
from winnow.attention.native import KernelStep
from winnow.config import ModelConfig
from winnow.errors import UnsupportedModelError
from winnow.models import load_model
from winnow.models.load import checkpoint

CONFIG = Llama4TextConfig(
    **_COMMON | {"num_hidden_layers": 4},
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size_mlp=48,
    num_local_experts=4,
    attention_chunk_size=24,
    no_rope_layers=[1, 0, 1, 0],
    attn_temperature_tuning=True,
    floor_scale=8,
    attn_scale=0.9,
)
PROMPTS = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (1, 23, 24, 47, 70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    path = tmp_path_factory.mktemp("llama4")
    model = save(CONFIG, path)
    return path, [generate_alone(model, tokens, GREEDY.max_tokens) for tokens in PROMPTS]


def answers(path: Path, **options: Any) -> list[list[int]]:
    with LLM(path, kv_memory="4MiB", max_num_seqs=3, **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        llm.check_integrity()
    return found


@pytest.mark.parametrize("chunk", [16, None])
def test_answers_run_over_the_borders_of_chunks(
    case: tuple[Path, list[list[int]]], chunk: int | None
) -> None:
    path, expected = case
    assert answers(path, prefill_chunk=chunk) == expected
    geometry = load_model(ModelConfig(path)).geometry
    assert geometry.windows == (24, None, 24, None) and geometry.chunked


CHANGES: dict[str, Callable[[AttentionSpec], AttentionSpec]] = {
    "a window in place of a chunk": lambda spec: replace(spec, chunked=False),
    "no chunk": lambda spec: replace(spec, window=None, chunked=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_chunk_left_out_is_noticed(
    change: str, case: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = case
    attend = KernelStep.attend

    def changed(self: KernelStep, layer: int, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return attend(self, layer, q, CHANGES[change](spec))

    monkeypatch.setattr(KernelStep, "attend", changed)
    assert answers(path, verify_model=False) != expected


def test_positions_left_out_are_noticed(
    case: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = case
    monkeypatch.setattr(checkpoint, "bind_counted_positions", lambda model: None)
    assert answers(path, verify_model=False) != expected
    with pytest.raises(UnsupportedModelError, match="Winnow computes something else"):
        load_model(ModelConfig(path))
