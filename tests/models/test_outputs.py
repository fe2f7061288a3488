"""The weights of output projections, whatever form they lie in; and scores that ask for them, on every architecture."""

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, save
from torch import nn
from transformers import AutoModelForCausalLM

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError, UnsupportedModelError
from winnow.eviction import (
    AdaptiveRows,
    ByOutputNorm,
    ByValueNorm,
    Compactor,
    EvictionPolicy,
    ExpectedAttention,
    Keep,
    Leverage,
    When,
)
from winnow.executor.torch_executor import TorchExecutor
from winnow.models.bind.outputs import output_projections

POLICIES = {
    "expected attention": EvictionPolicy(
        ByOutputNorm(ByValueNorm(ExpectedAttention(horizon=32))),
        AdaptiveRows(row_floor=0.3, wide_layers=1),
        Keep(sinks=4),
        When(after_prefill=True, prefill_every=16, decode_every=8),
    ),
    "compactor": EvictionPolicy(
        Compactor(chunk=24), AdaptiveRows(layer_floor=0.5), Keep(sinks=2), When(after_prefill=True)
    ),
    "unrotated": EvictionPolicy(
        Leverage(unrotated=True), AdaptiveRows(row_floor=0.3), Keep(sinks=2), When(after_prefill=True)
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_the_models(name: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[name], tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    with LLM(tmp_path, kv_memory="1MiB", block_size=4, dtype="float32") as llm:
        executor = llm._engine._executor
        assert isinstance(executor, TorchExecutor)
        geometry = executor._model.geometry
        width = geometry.num_query_heads * geometry.head_dim
        for layer in range(geometry.num_layers):
            found = executor._signals.output_weights(layer).flatten(0, 1)
            [(key, expected)] = [
                (key, weight)
                for key, weight in weights.items()
                if f".{layer}." in key and key.endswith(("o_proj.weight", "attn.c_proj.weight"))
            ]
            if "c_proj" not in key:
                expected = expected.T
            assert found.shape[0] == width
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"gpt2"}))
def test_scores_of_queries_and_outputs(name: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[name], tmp_path)
    prompts = [[(7 * n + seed) % 90 + 3 for n in range(60 + 20 * seed)] for seed in range(3)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, eviction=policy, kv_budget=24)
        for policy in POLICIES.values()
    ]
    kept = []
    for chunk in (16, None):
        with LLM(tmp_path, kv_memory="4MiB", block_size=4, prefill_chunk=chunk, dtype="float32") as llm:
            outputs = llm.generate(prompts, params)
            llm.check_integrity()
        reports = [output.outputs[0].eviction for output in outputs]
        assert all(report is not None and report.compression > 2 for report in reports)
        kept.append([output.outputs[0].token_ids for output in outputs])
    assert kept[0] == kept[1], "pieces of the prompt change nothing"


@pytest.mark.parametrize("policy", POLICIES)
def test_positions_that_cannot_be_taken_back_are_refused(policy: str, tmp_path: Path) -> None:
    """GPT-2 adds them to hidden states."""
    save(ARCHITECTURES["gpt2"], tmp_path)
    with LLM(tmp_path, kv_memory="1MiB", block_size=4) as llm:
        params = SamplingParams(max_tokens=2, eviction=POLICIES[policy], kv_budget=24)
        with pytest.raises(InvalidRequestError, match="how GPT2LMHeadModel rotates keys is not known"):
            llm.generate([list(range(3, 60))], params)


def test_a_model_whose_projections_are_unknown_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot find the output projections of its 2"):
        output_projections(nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])), [4, 4])
