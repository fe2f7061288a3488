"""A prompt that begins with a compressed prefix gives what it gives when nothing is known."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from random_predictor import save_random_predictor
from tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM, RequestOutput, SamplingParams
from winnow.eviction import PRESETS
from winnow.eviction.scores import BelowAverage
from winnow.inspect import KeptTokens

BLOCK = 4


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2} | options)
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_llama(tmp_path_factory.mktemp("model"), seed=3)
    save_random_predictor(path)
    return path


def open_llm(directory: Path, **options: object) -> LLM:
    defaults: dict[str, object] = {
        "block_size": BLOCK,
        "kv_memory": "8MiB",
        "num_accumulators": 2,
        "prefill_chunk": 64,
    }
    return LLM(directory, **(defaults | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cold(directory: Path) -> Iterator[LLM]:
    with open_llm(directory, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def warm(directory: Path) -> Iterator[LLM]:
    with open_llm(directory) as llm:
        yield llm


def observe(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[RequestOutput, KeptTokens]:
    """Answer a prompt, and say what it kept, where that can be said."""
    observer = KeptTokens()
    watched = None if getattr(params.eviction, "reassign_positions", False) else observer
    request = llm._request(llm._tokenize(prompt), params, observer=watched, final_only=True)
    [output] = llm._finish([request])
    output.raise_for_error()
    llm.check_integrity()
    return output, observer


def assert_same(warm: LLM, cold: LLM, prompt: list[int], params: SamplingParams) -> int:
    """Both answer alike, bit for bit. Returns how many tokens the warm one had."""
    found, kept = observe(warm, prompt, params)
    expected, kept_cold = observe(cold, prompt, params)
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
    assert kept.after_prompt == kept_cold.after_prompt
    assert kept.at_end == kept_cold.at_end
    assert expected.num_cached_tokens == 0
    return found.num_cached_tokens


AMOUNT = {
    name: {} if PRESETS[name].policy.budget.fixed is not None else {"kv_budget": 48} for name in PRESETS
}
WHOLE = [name for name in PRESETS if PRESETS[name].policy.when.after_prefill]
WITHIN = [name for name in PRESETS if PRESETS[name].policy.when.in_prefill]
# What these have learnt of queries or hidden states goes on to rounds after the context, and is no part of a snapshot.
WITHOUT = {"squeeze"}


@pytest.mark.parametrize("name", WHOLE)
def test_a_second_question_starts_from_the_compressed_document(warm: LLM, cold: LLM, name: str) -> None:
    policy = PRESETS[name].policy
    if policy.when.in_prefill:
        policy = replace(policy, when=replace(policy.when, prefill_every=None, within=False))
    if name == "scissorhands":
        policy = replace(policy, score=BelowAverage(40))  # queries of one chunk
    document = tokens(149, seed=WHOLE.index(name))
    params = greedy(eviction=policy, context_tokens=149, **AMOUNT[name])
    hits = [assert_same(warm, cold, document + tokens(n, seed=n), params) for n in (9, 30, 1)]
    assert hits == [0, *([0, 0] if name in WITHOUT else [149, 149])]


@pytest.mark.parametrize("name", WITHIN)
def test_prompts_that_begin_alike_go_on_from_a_round_within_them(warm: LLM, cold: LLM, name: str) -> None:
    policy = PRESETS[name].policy
    policy = replace(policy, when=replace(policy.when, prefill_every=32))
    params = greedy(eviction=policy, kv_budget=48)
    shared = tokens(170, seed=100 + WITHIN.index(name))
    hits = [assert_same(warm, cold, shared + tokens(n, seed=n), params) for n in (50, 70, 90)]
    # Snapshots are taken after rounds at 80 and 144 tokens; where the budget includes the tokens to come, also at 48
    # and 112.
    assert hits == [0, 144, 144]
