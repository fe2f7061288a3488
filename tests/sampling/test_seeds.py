"""Seeded answers: the same alone, in company, in any slot, in any order and after preemption."""

from typing import Any

import pytest
import torch
from sampling_support import make_sampler, random_logits

from winnow.sampling import SamplingParams

VOCAB, STEPS = 40, 12
LOGITS = random_logits(STEPS, VOCAB, seed=7)
KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 7, "top_p": 0.9},
    {"top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    {"min_tokens": 6, "logit_bias": {3: 2.0}, "logprobs": 2},
]


def answer_alone(params: SamplingParams, sample_index: int = 0) -> list[int]:
    sampler = make_sampler(1, VOCAB, eos=[2])
    sampler.add(0, params, [1, 2, 3], sample_index=sample_index)
    return [sampler.sample(LOGITS[step][None], [0]).token_ids[0] for step in range(STEPS)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_same_answer_in_any_batch_slot_and_order(kind: dict[str, Any]) -> None:
    params = SamplingParams(seed=11, **kind)
    expected = answer_alone(params)
    sampler = make_sampler(16, VOCAB, eos=[2], seed=99)
    sampler.add(13, params, [1, 2, 3])
    others = [(slot, KINDS[slot % len(KINDS)]) for slot in range(10)]
    for slot, other in others:
        sampler.add(slot, SamplingParams(**other), [slot])
    answer: list[int] = []
    for step in range(STEPS):
        company = [slot for slot, _ in others][step % 5 :]  # changes from step to step
        place = step % (len(company) + 1)
        slots = [*company[:place], 13, *company[place:]]
        logits = random_logits(len(slots), VOCAB, seed=step)
        logits[place] = LOGITS[step]
        answer.append(sampler.sample(logits, slots).token_ids[place])
    assert answer == expected


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("interrupted_after", [1, 5, 11])
def test_same_answer_after_preemption(kind: dict[str, Any], interrupted_after: int) -> None:
    params = SamplingParams(seed=11, **kind)
    sampler = make_sampler(4, VOCAB, eos=[2])
    sampler.add(0, params, [1, 2, 3])
    answer: list[int] = []
    slot = 0
    for step in range(STEPS):
        if step == interrupted_after:
            sampler.remove(0)
            sampler.add(1, SamplingParams(presence_penalty=1.0), [5], [6])
            slot = 3
            sampler.add(slot, params, [1, 2, 3], answer)
        answer.append(sampler.sample(LOGITS[step][None], [slot]).token_ids[0])
    assert answer == answer_alone(params)


def test_samples_and_seeds_differ() -> None:
    answers = [answer_alone(SamplingParams(seed=seed), sample) for seed in (1, 2) for sample in (0, 1, 2)]
    assert len({tuple(answer) for answer in answers}) == 6


def run_unseeded(seed: int) -> list[list[int]]:
    sampler = make_sampler(3, VOCAB, seed=seed)
    for slot in range(3):
        sampler.add(slot, SamplingParams(), [])
    steps = [sampler.sample(LOGITS[step].expand(3, -1), [0, 1, 2]).token_ids for step in range(STEPS)]
    return [list(answer) for answer in zip(*steps, strict=True)]


def test_unseeded_requests_differ_but_repeat_with_the_engines_seed() -> None:
    first, again, other = run_unseeded(5), run_unseeded(5), run_unseeded(6)
    assert first == again and first != other
    assert len({tuple(answer) for answer in first}) == 3


def test_with_seed_makes_an_unseeded_request_survive_preemption() -> None:
    sampler = make_sampler(1, VOCAB)
    params = sampler.with_seed(SamplingParams(temperature=2.0))
    assert params.seed is not None and params.temperature == 2.0
    assert sampler.with_seed(params) is params
    assert sampler.with_seed(SamplingParams()).seed != params.seed
    expected = answer_alone(params)
    sampler.add(0, params, [], expected[:5])
    assert sampler.sample(LOGITS[5][None], [0]).token_ids == [expected[5]]


def test_large_vocabularies_give_the_same_in_company() -> None:
    """A lone row of many logits is where a sum split among threads would round differently."""
    logits = random_logits(6, 200_000, seed=3, scale=0.5)
    params = SamplingParams(seed=4, top_p=0.95)
    together = make_sampler(6, 200_000)
    for slot in range(6):
        together.add(slot, params, [], sample_index=slot)
    batch = together.sample(logits, range(6)).token_ids
    for row in range(6):
        alone = make_sampler(1, 200_000)
        alone.add(0, params, [], sample_index=row)
        assert alone.sample(logits[row : row + 1], [0]).token_ids == [batch[row]]


def test_threads_do_not_matter() -> None:
    logits = random_logits(1, 100_000, seed=5)
    before = torch.get_num_threads()
    try:
        answers = set()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sampler = make_sampler(1, 100_000)
            sampler.add(0, SamplingParams(seed=8), [])
            answers.add(tuple(sampler.sample(logits, [0]).token_ids[0] for _ in range(20)))
        assert len(answers) == 1
    finally:
        torch.set_num_threads(before)
