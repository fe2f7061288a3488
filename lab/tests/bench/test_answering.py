"""Requests through an engine, and what every step brought."""

from pathlib import Path

from tiny_llama import save_tiny_llama

from winnow import LLM
from winnow_lab.bench.answering import answer_all, fixed_length


def test_requests_are_answered_in_their_order_and_counted_alone(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    seen = []
    with LLM(model, kv_memory="8MiB", dtype="float32", device="cpu") as llm:
        llm.generate([1, 2, 3], fixed_length(4))
        requests = [([1, 2, 3], fixed_length(6)), ([4, 5], fixed_length(2))]
        done = answer_all(llm, requests, lambda finished, stats: seen.append(finished))
        final = answer_all(llm, requests, final_only=True)
    assert [len(answer) for answer in done.answers] == [6, 2]
    assert final.answers == done.answers
    assert done.counted("generated_tokens") == 8, "not those of earlier requests"
    assert sum(step.outputs for step in done.steps) == 8 and sum(step.outputs for step in final.steps) == 2
    assert seen == [step.finished for step in done.steps] == sorted(seen) and seen[-1] == 2
    assert 0 < sum(done.parts.values()) <= done.seconds == done.steps[-1].seconds
    assert 0 < done.kv_bytes_peak <= done.steps[0].stats.kv_bytes_budget


def test_requests_come_when_they_arrive(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    with LLM(model, kv_memory="8MiB", dtype="float32", device="cpu") as llm:
        requests = [([1, 2, 3], fixed_length(3)), ([4, 5], fixed_length(2))]
        done = answer_all(llm, requests, arrivals=[0.0, 0.5])
    assert [len(answer) for answer in done.answers] == [3, 2]
    assert [step.submitted for step in done.steps] == [1, 1, 1, 2, 2]
    assert done.steps[2].seconds < 0.5 <= done.steps[3].seconds
