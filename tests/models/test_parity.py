"""Greedy tokens equal transformers' own, token for token, in float32."""

import random
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, VOCAB, generate_alone, save

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize

LENGTHS = [1, 5, 16, 17, 33, 70, 121, 200]
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


def answers(
    path: Path, prompts: list[list[int]], params: SamplingParams = GREEDY, **options: object
) -> list[list[int]]:
    with LLM(path, kv_memory="4MiB", **options) as llm:
        outputs = llm.generate(prompts, params)
        llm.check_integrity()
        return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("chunk", [16, 64, None])
def test_batch_of_mixed_lengths(case: tuple[Path, list[list[int]]], chunk: int | None) -> None:
    path, expected = case
    assert answers(path, PROMPTS, prefill_chunk=chunk) == expected


def test_one_at_a_time(case: tuple[Path, list[list[int]]]) -> None:
    path, expected = case
    with LLM(path, kv_memory="4MiB") as llm:
        for tokens, wanted in zip(PROMPTS, expected, strict=True):
            assert llm.generate(tokens, GREEDY)[0].outputs[0].token_ids == wanted


def test_samples_share_their_prompt(case: tuple[Path, list[list[int]]]) -> None:
    path, expected = case
    params = SamplingParams(n=3, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answers(path, PROMPTS, params, prefill_chunk=64) == [e for e in expected for _ in range(3)]


def test_small_blocks_and_preemption(case: tuple[Path, list[list[int]]]) -> None:
    """Samples that share blocks, in a pool for little more than the longest prompt: preempted and recomputed."""
    path, expected = case
    options = {"block_size": 4, "max_num_seqs": 12, "prefill_chunk": 32}
    params = SamplingParams(n=2, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(path, kv_memory="4MiB", **options) as llm:
        cache = llm._engine.scheduler.ledger
        blocks = cache.layout.blocks_for(max(LENGTHS) + MAX_TOKENS)
        room = CacheSize.of_blocks(cache.layout, blocks, cache.size.max_num_seqs, llm.max_model_len).nbytes(
            cache.layout
        )
    with LLM(path, kv_memory=room, **options) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert [c.token_ids for o in outputs for c in o.outputs] == [e for e in expected for _ in range(2)]
        assert llm.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert llm.stats().kv_bytes_peak <= llm.config.cache.kv_memory
        llm.check_integrity()


def test_alone_and_among_31_others(case: tuple[Path, list[list[int]]]) -> None:
    path, expected = case
    others = [prompt(length) for length in range(100, 131)]
    assert answers(path, [*others[:10], PROMPTS[5], *others[10:]])[10] == expected[5]
