"""Whole answers with the Triton backend, rounds of eviction among them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import save_tiny_llama
from torch import Tensor
from triton_case import DEVICE

from winnow import LLM, SamplingParams
from winnow.attention import Spans
from winnow.attention.triton import backend as backend_module
from winnow.executor import step_graphs, torch_executor
from winnow.executor.step_graphs import StepGraphs
from winnow.models.fast import optimize
from winnow.models.fast.fused.triton_passes import TritonPasses


def test_fused_layers_rotate_and_store_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are those of the reference, and no launch only rotates or only stores."""
    model = save_tiny_llama(
        tmp_path, seed=3, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    params, answers = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), []
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
@pytest.mark.parametrize(
    ("eviction", "budget", "chunk", "layers"), [("h2o", 12, 16, 2), ("snapkv", 40, 32, 1)]
)
def test_answers_and_what_is_kept_equal_the_reference(
    eviction: str, budget: int, chunk: int, layers: int, tmp_path: Path
) -> None:
    """One policy watches all queries, the other pools what the last ones of the prompt saw."""
    model = save_tiny_llama(tmp_path, seed=3, num_hidden_layers=layers)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10, 11] * (chunk // 5), [3, 4] * 5)]
    answers = []
    for backend in ("triton", "reference"):
        llm = LLM(
            model,
            device=DEVICE,
            attention_backend=backend,
            kv_memory="1MiB",
            block_size=4,
            prefill_chunk=chunk,
            eviction=eviction,
            kv_budget=budget,
        )
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        completions = [output.outputs[0] for output in outputs]
        assert completions[0].eviction is not None and completions[0].eviction.rounds > 0
        answers.append([(c.token_ids, c.eviction and c.eviction.kept) for c in completions])
    assert answers[0] == answers[1]


def test_answers_of_graphs_equal_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come in small chunks beside sequences that decode, and what a graph saw once is computed again."""
    model = save_tiny_llama(tmp_path, seed=3, num_hidden_layers=1)
    monkeypatch.setattr(step_graphs, "_LEAST_TOKENS", 8)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [3, 4] * 4, [8] * 7)]
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    answers: list[Any] = []
    found: list[tuple[bool, bool]] = []

    class Recorded(StepGraphs):
        def run(self, tokens: Tensor, spans: Spans, wanted: Sequence[int]) -> Tensor | None:
            logits = super().run(tokens, spans, wanted)
            found.append((logits is not None, spans.num_decodes < len(spans.counts)))
            return logits

    monkeypatch.setattr(torch_executor, "StepGraphs", Recorded)
    if DEVICE == "cpu":  # a step that was "captured" is computed again
        monkeypatch.setattr(torch_executor, "graph_capture", lambda device: lambda compute: compute)
    for backend in ("reference", "triton"):
        options: dict[str, Any] = {
            "attention_backend": backend,
            "max_num_batched_tokens": 4,
            "kv_memory": "1MiB",
        }
        with LLM(model, device=DEVICE, block_size=4, max_num_seqs=3, **options) as llm:
            answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert {(True, True), (True, False)} <= set(found), "graphs with chunks, and without"
