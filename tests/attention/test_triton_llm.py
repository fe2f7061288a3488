"""Whole answers with the Triton backend, rounds of eviction among them."""

from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama
from triton_case import DEVICE

from winnow import LLM, SamplingParams
from winnow.attention.triton import backend as backend_module
from winnow.models import optimize
from winnow.models.fused.triton.passes import TritonPasses


def test_fused_layers_rotate_and_store_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of the reference, and no launch only rotates or only stores."""
    model = save_tiny_llama(tmp_path, seed=3)
    params, answers = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), []
    monkeypatch.setattr(optimize, "_passes_fit", lambda model: True)
    for backend in ("reference", "triton"):
        with LLM(model, device=DEVICE, attention_backend=backend, kv_memory="1MiB", block_size=4) as llm:
            if backend == "triton":
                monkeypatch.setattr(TritonPasses, "rotate", None)
                monkeypatch.setattr(backend_module, "write_kvs", None)
            answers.append(llm.generate([[5, 6, 7, 8, 9], [3, 4]], params))
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in answers]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize(("eviction", "budget"), [("h2o", 24), ("snapkv", 40)])
def test_answers_and_what_is_kept_equal_the_reference(eviction: str, budget: int, tmp_path: Path) -> None:
    """One policy watches all queries, the other pools what the last ones of the prompt saw."""
    model = save_tiny_llama(tmp_path, seed=3)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10, 11] * 7, [3, 4] * 9)]
    answers = []
    for backend in ("triton", "reference"):
        llm = LLM(
            model,
            device=DEVICE,
            attention_backend=backend,
            kv_memory="1MiB",
            block_size=4,
            prefill_chunk=32,
            eviction=eviction,
            kv_budget=budget,
        )
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        completions = [output.outputs[0] for output in outputs]
        assert completions[0].eviction is not None and completions[0].eviction.rounds > 0
        answers.append([(c.token_ids, c.eviction and c.eviction.kept) for c in completions])
    assert answers[0] == answers[1]
