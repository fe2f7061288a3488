"""Compression where it is needed: `compression=auto`, and replays that do not fit."""

from dataclasses import replace
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.engine.memory.swap_costs import Fit, SwapCosts
from winnow.errors import CapacityError, InvalidRequestError

PROMPTS = [list(range(10 + i, 510 + i)) for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def whole() -> int:
    """Bytes of the KVs of one request."""
    with LLM(kv_memory="64MiB") as llm:
        return llm.kv_bytes(507)


def answers(params: SamplingParams = GREEDY, count: int = len(PROMPTS), **options: Any) -> Any:
    with LLM(kv_floor=16, max_num_batched_tokens=1024, dtype="float32", **options) as llm:
        outputs = llm.generate(PROMPTS[:count], params)
        llm.check_integrity()
        return [output.outputs[0] for output in outputs], llm.stats()


def test_nothing_is_evicted_while_all_that_wait_fit() -> None:
    full, _ = answers(kv_memory="64MiB")
    auto, stats = answers(kv_memory="64MiB", compression="auto")
    assert [answer.token_ids for answer in auto] == [answer.token_ids for answer in full]
    assert (stats.num_rounds, stats.num_starts, stats.num_short_starts) == (0, 6, 0)
    assert all(answer.eviction is not None and answer.eviction.compression == 1 for answer in auto)


def test_what_runs_shrinks_for_what_waits_and_no_further_than_it_must(whole: int) -> None:
    auto, stats = answers(kv_memory=str(int(2.6 * whole)), compression="auto")
    compressions = [answer.eviction.compression for answer in auto]
    # The last two fit together, whatever came before them.
    assert max(compressions) > 1.8 and compressions[-1] == 1
    assert stats.num_short_starts > 0 < stats.num_rounds and stats.num_preemptions == 0
    _, tighter = answers(kv_memory=str(int(1.5 * whole)), compression="auto")
    assert tighter.kv_bytes_kept < stats.kv_bytes_kept
    assert stats.kv_bytes_whole == 6 * whole
    assert stats.kv_bytes_kept == sum(answer.eviction.bytes_held for answer in auto)


def test_a_prompt_is_cut_by_its_question_where_it_ends(whole: int) -> None:
    memory = {"kv_memory": str(int(1.5 * whole)), "compression": "auto"}
    auto, stats = answers(**memory)
    assert {answer.eviction.policy for answer in auto} == {"winnow-seen"}
    assert stats.outlook is not None and stats.outlook.compression > 7.9
    # One round each: nothing waited for what a first round had left.
    assert stats.num_rounds == stats.num_short_starts
    later, _ = answers(replace(GREEDY, context_tokens=480), **memory)
    assert {answer.eviction.policy for answer in later} == {"winnow-keys"}


def test_a_request_may_leave_it_to_the_engine(whole: int) -> None:
    auto, stats = answers(replace(GREEDY, compression="auto"), kv_memory=str(int(1.5 * whole)))
    assert {answer.eviction.policy for answer in auto} == {"winnow-seen"} and stats.num_short_starts
    with pytest.raises(InvalidRequestError, match="compression must be a number, got 'some'"):
        replace(GREEDY, compression="some")
    with pytest.raises(InvalidRequestError, match="compression=auto asks for fewer"):
        answers(replace(GREEDY, compression="auto"), kv_memory="4MiB", eviction="full")


def test_prompts_are_cut_no_further_than_nearly_all_of_the_gain_asks_for(
    monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Steps that take longer with each sequence: more of them than 4x lets in gain nothing."""
    monkeypatch.setattr(SwapCosts, "recompute_seconds", lambda self, num_tokens: 0.0)
    monkeypatch.setattr(Fit, "predict", lambda self, u, v: 1.0 + max(v - 4, 0) / 4)
    _, stats = answers(kv_memory=str(int(1.5 * whole)), compression="auto")
    assert stats.outlook is not None and stats.outlook.compression == 4


def test_samples_of_a_prompt_are_decided_together() -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    with LLM(kv_memory="9MiB", kv_floor=16, compression="auto", max_num_batched_tokens=1024) as llm:
        for output in llm.generate(PROMPTS, params):
            first, second = (answer.eviction for answer in output.outputs)
            assert first is not None and second is not None and first.kv_budget == second.kv_budget
        llm.check_integrity()


def test_a_fork_goes_on_under_what_was_decided() -> None:
    with LLM(kv_memory="64MiB", kv_floor=16, compression="auto") as llm:
        parent = llm.submit(PROMPTS[0], GREEDY)
        while not any(output.outputs[0].token_ids for output in llm.step()):
            pass
        llm.fork(parent)
        done = []
        while llm.has_unfinished:
            done += [output.outputs[0] for output in llm.step() if output.finished]
        assert done[0].token_ids == done[1].token_ids
        assert llm.stats().num_rounds == 0


@pytest.mark.parametrize(("memory", "policy"), [(1.4, "winnow-seen"), (3.0, "kvzip")])
def test_a_replay_that_does_not_fit_is_replaced(memory: float, policy: str, whole: int) -> None:
    options = {"eviction": "kvzip", "compression": 8.0}
    found, stats = answers(count=2, kv_memory=str(int(memory * whole)), **options)
    assert {answer.eviction.policy for answer in found} == {policy}
    assert stats.num_replays_replaced == (0 if policy == "kvzip" else 2)
    assert all(answer.eviction.compression > 4 for answer in found)


def test_a_replay_without_positions_behind_its_context_is_replaced() -> None:
    options = {"eviction": "kvzip", "compression": 8.0, "max_model_len": 520}
    found, stats = answers(count=2, kv_memory="64MiB", **options)
    assert {answer.eviction.policy for answer in found} == {"winnow-seen"}
    assert stats.num_replays_replaced == 2


def test_what_does_not_fit_in_any_way_is_refused_for_what_was_asked(whole: int) -> None:
    with pytest.raises(CapacityError, match="needs room for 1024 KVs a row"):
        answers(kv_memory=str(int(0.7 * whole)), eviction="kvzip", compression=8.0)


def test_where_answers_are_a_few_tokens_compressing_is_found_not_to_pay(
    monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Prompts that take 1,000 times as long as a step of answers leave nothing to be gained."""
    monkeypatch.setattr(SwapCosts, "recompute_seconds", lambda self, num_tokens: 1.0)
    monkeypatch.setattr(Fit, "predict", lambda self, u, v: 0.001)
    found, stats = answers(kv_memory=str(int(2.6 * whole)), compression="auto")
    assert stats.num_short_starts > 0 == stats.num_rounds
    assert stats.outlook is not None and stats.outlook.gain == pytest.approx(1.0, abs=0.02)
    assert "every KV stays" in str(stats.outlook)
    assert all(answer.eviction.compression == 1 for answer in found)
