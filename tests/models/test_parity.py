"""Greedy tokens equal transformers' own, token for token, in float32."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, VOCAB, generate_alone, save

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize

LENGTHS = [1, 16, 17, 33, 70, 121, 200]
MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


PROMPTS = [prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A model's directory, and what transformers answers to each prompt alone."""
    path = tmp_path_factory.mktemp(request.param)
    model = save(ARCHITECTURES[request.param], path)
    return path, [generate_alone(model, tokens, MAX_TOKENS) for tokens in PROMPTS]


@pytest.fixture(scope="module")
def llm(case: tuple[Path, list[list[int]]]) -> Iterator[LLM]:
    with LLM(case[0], kv_memory="4MiB", prefill_chunk=None) as llm:
        yield llm


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    llm.check_integrity()
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_batch_of_mixed_lengths(case: tuple[Path, list[list[int]]], llm: LLM) -> None:
    """Whole, and in chunks below."""
    assert answers(llm, PROMPTS) == case[1]


def test_one_at_a_time(case: tuple[Path, list[list[int]]], llm: LLM) -> None:
    llm.reset_prefix_cache()
    for tokens, wanted in zip(PROMPTS, case[1], strict=True):
        assert answers(llm, [tokens]) == [wanted]


def test_samples_share_their_prompt(case: tuple[Path, list[list[int]]], llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(llm, PROMPTS, params) == [each for each in case[1] for _ in range(3)]


def test_alone_and_among_31_others(case: tuple[Path, list[list[int]]], llm: LLM) -> None:
    llm.reset_prefix_cache()
    others = [prompt(length) for length in range(40, 71)]
    assert answers(llm, [*others[:10], PROMPTS[3], *others[10:]])[10] == case[1][3]


def test_chunks_small_blocks_and_preemption(case: tuple[Path, list[list[int]]]) -> None:
    """Samples that share blocks, in a pool for little more than the longest prompt: preempted and recomputed."""
    path, expected = case
    options = {"block_size": 4, "max_num_seqs": 12, "prefill_chunk": 32}
    params = SamplingParams(n=2, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(path, kv_memory="4MiB", **options) as llm:
        assert answers(llm, PROMPTS) == expected
        cache = llm._engine.scheduler.ledger
        blocks = cache.layout.blocks_for(max(LENGTHS) + MAX_TOKENS)
        room = CacheSize.of_blocks(cache.layout, blocks, cache.size.max_num_seqs, llm.max_model_len).nbytes(
            cache.layout
        )
    with LLM(path, kv_memory=room, **options) as llm:
        assert answers(llm, PROMPTS, params) == [each for each in expected for _ in range(2)]
        assert llm.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert llm.stats().kv_bytes_peak <= llm.config.cache.kv_memory
