"""The vectorised sampler against the oracle, and each rule by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from sampling_oracle import adjusted, verdict
from sampling_support import CPU, draws, fault_of, make_sampler, random_logits, sample_many, sample_once

from winnow.errors import InvalidRequestError
from winnow.sampling import Sampler, SamplerOutput, SamplingParams
from winnow.sampling.rows import Fault

VOCAB = 12
EOS = frozenset({1, 4})
TOKENS = st.integers(0, VOCAB - 1)
INF = float("inf")


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    """Every rule switched on or off by itself."""
    max_tokens = 20

    def maybe(name: str, values: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {name: draw(values)} if draw(st.booleans()) else {}

    return SamplingParams(
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 10**9)),
        ignore_eos=draw(st.booleans()),
        **maybe("temperature", st.sampled_from([0.0, 0.3, 1.0, 3.0])),
        **maybe("top_k", st.integers(-1, VOCAB + 2)),
        **maybe("top_p", st.floats(0.05, 1)),
        **maybe("min_p", st.floats(0, 1)),
        **maybe("repetition_penalty", st.floats(0.5, 2)),
        **maybe("presence_penalty", st.floats(-2, 2)),
        **maybe("frequency_penalty", st.floats(-2, 2)),
        **maybe("logit_bias", st.dictionaries(TOKENS, st.floats(-5, 5), max_size=4)),
        **maybe("stop_token_ids", st.lists(TOKENS, max_size=3)),
        **maybe("min_tokens", st.integers(0, 4)),
        **maybe("logprobs", st.integers(0, 3)),
    )


@st.composite
def any_batch(draw: st.DrawFn) -> list[tuple[SamplingParams, list[int], list[int]]]:
    history = st.lists(TOKENS, max_size=5)
    return draw(st.lists(st.tuples(any_params(), history, history), min_size=1, max_size=6))


@hypothesis_settings(max_examples=60)
@given(any_batch(), st.integers(0, 10**6), st.booleans())
def test_mixed_batches_follow_the_oracle(
    batch: list[tuple[SamplingParams, list[int], list[int]]], seed: int, grid: bool
) -> None:
    """Three steps of up to six requests that share nothing; on a coarse grid of logits there are ties."""
    sampler = make_sampler(8, VOCAB, tuple(EOS))
    slots = [int(slot) for slot in np.random.default_rng(seed).permutation(8)[: len(batch)]]
    answers = [list(output) for _, _, output in batch]
    for slot, (params, prompt, output) in zip(slots, batch, strict=True):
        sampler.add(slot, params, prompt, output, sample_index=slot)
    for step in range(3):
        logits = random_logits(len(batch), VOCAB, seed=seed + step)
        if grid:
            logits = logits.round()
        got = sampler.sample(logits, slots).token_ids
        for row, (slot, (params, prompt, _)) in enumerate(zip(slots, batch, strict=True)):
            assert params.seed is not None
            random = draws(params.seed, [len(answers[row])], sample_index=slot)[0]
            expected = verdict(
                adjusted(logits[row].tolist(), params, prompt, answers[row], EOS), params, random
            )
            assert expected.close or got[row] in expected.tokens
            answers[row].append(got[row])


def test_a_batch_of_every_kind_is_not_too_close_to_call() -> None:
    """The oracle test would be empty if the oracle always declined to judge."""
    params = SamplingParams(
        top_k=5, top_p=0.8, min_p=0.02, repetition_penalty=1.3, frequency_penalty=0.5, seed=1
    )
    close = 0
    for step in range(200):
        logits = random_logits(VOCAB, seed=step).tolist()
        close += verdict(adjusted(logits, params, [1, 2], [2, 3], EOS), params, draws(1, [step])[0]).close
    assert close < 5


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample_once(torch.tensor([0.0, 3.0, 3.0, 1.0]), temperature=0) == 1


def test_greedy_rows_obey_penalties_and_bias() -> None:
    logits = torch.tensor([1.0, 3.0, 2.9, 0.0])
    assert sample_once(logits, temperature=0, logit_bias={1: -1}) == 2
    sampler = make_sampler(3, 4)
    sampler.add(0, SamplingParams(temperature=0, repetition_penalty=1.5), [1])
    sampler.add(1, SamplingParams(temperature=0, presence_penalty=1.0), [1])
    sampler.add(2, SamplingParams(temperature=0, presence_penalty=1.0), [], [1])
    assert sampler.sample(logits.expand(3, -1), [0, 1, 2]).token_ids == [2, 1, 2]


def test_sampled_tokens_count_against_themselves() -> None:
    sampler = make_sampler(2, 3)
    sampler.add(0, SamplingParams(temperature=0, frequency_penalty=1.0), [])
    sampler.add(1, SamplingParams(temperature=0, presence_penalty=1.0), [])
    logits = torch.tensor([[2.5, 2.0, 0.0]]).expand(2, -1)
    steps = [sampler.sample(logits, [0, 1]).token_ids for _ in range(6)]
    frequency, presence = ([step[row] for step in steps] for row in (0, 1))
    assert frequency == [0, 1, 0, 1, 0, 1] and presence == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"min_tokens": 2}, [0, 0, 1]),
        ({"min_tokens": 2, "stop_token_ids": [0]}, [2, 2, 1]),
        # An ignored end of sequence ends nothing: it may come at any time. A stop token still ends the answer.
        ({"min_tokens": 2, "ignore_eos": True}, [1, 1, 1]),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1]}, [0, 0, 1]),
        ({"min_tokens": 2, "logit_bias": {1: 100}}, [0, 0, 1]),
    ],
)
def test_min_tokens_forbids_what_would_end_the_answer(params: dict[str, Any], expected: list[int]) -> None:
    sampler = make_sampler(1, 3, eos=[1])
    sampler.add(0, SamplingParams(temperature=0, **params), [])
    logits = torch.tensor([[2.0, 3.0, 1.0]])
    assert [sampler.sample(logits, [0]).token_ids[0] for _ in range(3)] == expected


def test_min_tokens_counts_what_was_answered_before_preemption() -> None:
    sampler = make_sampler(1, 2, eos=[1])
    sampler.add(0, SamplingParams(temperature=0, min_tokens=2), [], [0])
    logits = torch.tensor([[0.0, 1.0]])
    assert [sampler.sample(logits, [0]).token_ids[0] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [-INF, float("nan")])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}, {"top_p": 0.5}])
def test_a_row_with_nothing_possible_is_a_fault(
    temperature: float, value: float, filters: dict[str, Any]
) -> None:
    params: dict[str, Any] = {"temperature": temperature, **filters}
    assert fault_of(torch.full((5,), value), **params) is Fault.NOT_FINITE
    everything: dict[str, Any] = {"min_tokens": 1, "stop_token_ids": range(5)}
    assert fault_of(torch.arange(5.0), **params, **everything) is Fault.NOTHING_LEFT
    assert fault_of(torch.full((5,), value), **params, **everything) is Fault.NOT_FINITE
    rest = torch.tensor([0.0, -INF, -INF])
    assert fault_of(rest, **params, min_tokens=1, stop_token_ids=[0]) is Fault.NOTHING_LEFT
    assert fault_of(rest, **params, logit_bias={0: -100}) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-5])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 0.01}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_infinite_and_undefined_logits_harm_no_other(
    temperature: float, filters: dict[str, Any], dtype: torch.dtype
) -> None:
    """Among rows of all kinds, sound ones get their tokens, of which one may be ruled out."""
    nan = float("nan")
    rows = [[nan] * 3, [-INF, 50.0, 1.0], [0.0, INF, 1.0], [0.0, nan, 1.0], [50.0, 1.0, -INF], [-INF] * 3]
    sampler = make_sampler(6, 3)
    for slot in range(6):
        asked: dict[str, Any] = {"logprobs": 1} if slot % 2 else {}
        sampler.add(slot, SamplingParams(temperature=temperature, **filters, **asked), [0])
    for _ in range(2):
        output = sampler.sample(torch.tensor(rows, dtype=dtype), range(6))
        assert set(output.faults) == {0, 2, 3, 5} and set(output.faults.values()) == {Fault.NOT_FINITE}
        assert output.token_ids == [0, 1, 0, 0, 0, 0]
        assert [row for row, report in enumerate(output.logprobs) if report is not None] == [1]


def test_a_forced_token_needs_finite_logits_but_may_be_ruled_out() -> None:
    sampler = make_sampler(2, 3)
    for slot in range(2):
        sampler.add(slot, SamplingParams(forced_tokens=[1, 1], logprobs=1), [])
    output = sampler.sample(torch.tensor([[0.0, -INF, 1.0], [0.0, INF, 1.0]]), [0, 1])
    assert output.faults == {1: Fault.NOT_FINITE} and output.token_ids[0] == 1
    report = output.logprobs[0]
    assert report is not None and list(report) == [1, 2]
    assert report[1].logprob == -INF and report[1].rank == 3


def test_faults_name_the_format_and_a_remedy() -> None:
    assert "float16" in Fault.NOT_FINITE.explain(torch.float16)
    assert "bfloat16" in Fault.NOT_FINITE.explain(torch.float16)
    assert "weights" in Fault.NOT_FINITE.explain(torch.bfloat16)
    assert "min_tokens" in Fault.NOTHING_LEFT.explain(torch.float16)


def test_all_equal_logits_keep_every_token_in_the_draw() -> None:
    """Top-k and top-p treat equals alike: there is no k-th among equals."""
    assert set(sample_many(torch.zeros(4), 100, top_k=1)) == {0, 1, 2, 3}
    assert set(sample_many(torch.zeros(4), 100, top_p=0.1)) == {0, 1, 2, 3}
    assert set(sample_many(torch.tensor([1.0, 0.0, 1.0, 0.0]), 100, top_k=2, top_p=0.6)) == {0, 2}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-INF, 1.0, -INF, -INF, 0.5, -INF])
    assert set(sample_many(logits, 500)) == {1, 4}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_taken_and_left_alone(dtype: torch.dtype) -> None:
    logits = random_logits(4, 12).to(dtype)
    before = logits.clone()
    params = SamplingParams(seed=3, top_p=0.9, repetition_penalty=2, logit_bias={1: 2.0})
    results = []
    for each in (logits, logits.float()):
        sampler = make_sampler()
        for slot in range(4):
            sampler.add(slot, params, [2, 3])
        results.append(sampler.sample(each, [0, 1, 2, 3]).token_ids)
    assert results[0] == results[1] and torch.equal(logits, before)


def test_a_reused_slot_and_row_remember_nothing() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2, logit_bias={0: 1}, min_tokens=3)
    sampler = make_sampler(2, 3, eos=[2])
    sampler.add(0, SamplingParams(temperature=0, frequency_penalty=1.0), [])  # keeps the tables alive
    sampler.add(1, params, [0], [0, 1])
    sampler.remove(1)
    sampler.add(1, SamplingParams(temperature=0, presence_penalty=1.0, repetition_penalty=2), [])
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert sampler.sample(logits, [1]).token_ids == [0]
    sampler.remove(1)
    sampler.add(1, SamplingParams(temperature=0, logprobs=0), [])
    assert sampler.sample(torch.tensor([[0.0, 0.5, 1.0]]), [1]).token_ids == [2]


def test_no_slots_no_tokens() -> None:
    assert make_sampler().sample(torch.zeros(0, 12), []) == SamplerOutput([], [])


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    sampler = make_sampler(1, 5)
    with pytest.raises(InvalidRequestError, match="logit_bias must hold token ids below 5"):
        sampler.add(0, SamplingParams(logit_bias={5: 1.0}), [])
    with pytest.raises(InvalidRequestError, match="prompt token ids must be between 0 and 4, got 5"):
        sampler.add(0, SamplingParams(presence_penalty=1.0), [5])
    with pytest.raises(InvalidRequestError, match="output token ids must be between 0 and 4, got -1"):
        sampler.add(0, SamplingParams(presence_penalty=1.0), [], [-1])
    sampler.add(0, SamplingParams(), [])


def test_misuse_by_the_engine_is_caught() -> None:
    sampler = make_sampler(2, 3)
    sampler.add(0, SamplingParams(), [])
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        sampler.add(0, SamplingParams(), [])
    with pytest.raises(AssertionError, match="slot 1 is free"):
        sampler.remove(1)
    with pytest.raises(AssertionError, match="in use"):
        sampler.sample(torch.zeros(1, 3), [1])
    with pytest.raises(AssertionError, match="once per step"):
        sampler.sample(torch.zeros(2, 3), [0, 0])
    with pytest.raises(AssertionError, match="one row of logits per token"):
        sampler.sample(torch.zeros(2, 3), [0])
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        Sampler(1, 3, CPU, frozenset({3}))
