"""Scores that ask how keys are rotated; see test_rotation.py for every class."""

from pathlib import Path

import pytest
from architectures import ARCHITECTURES, save

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, Leverage, When

POLICIES = {
    "unrotated": EvictionPolicy(
        Leverage(unrotated=True), AdaptiveRows(row_floor=0.3), Keep(sinks=2), When(after_prefill=True)
    )
}


@pytest.mark.parametrize("name", ["phi3", "qwen3", "gemma3", "gpt-oss"])
def test_scores_of_unrotated_keys(name: str, tmp_path: Path) -> None:
    save(ARCHITECTURES[name], tmp_path)
    prompts = [[(7 * n + seed) % 90 + 3 for n in range(60 + 20 * seed)] for seed in range(3)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, eviction=policy, kv_budget=24)
        for policy in POLICIES.values()
    ]
    kept = []
    for chunk in (16, None):
        with LLM(tmp_path, kv_memory="4MiB", block_size=4, prefill_chunk=chunk, dtype="float32") as llm:
            outputs = llm.generate(prompts, params * len(prompts))
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
