"""Pictures: greedy answers are transformers' own, whatever shares the batch, the cache and the memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from image_models import FAMILIES, generate, picture, processor_of, save

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize
from winnow.engine.memory.swap_costs import FixedCosts

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
SMALL = {"block_size": 4, "prefill_chunk": 7, "max_num_seqs": 6}


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[Any]
    """One picture, two pictures of other sizes, text alone, the first text with another picture, and a conversation
    that goes on from the first with a picture in its second turn."""
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param)
    model = save(request.param, path)
    processor, mark = processor_of(path, model), FAMILIES[request.param].mark
    first, other = f"w1 w2 w8 {mark} w3 w4 w5", picture(7)
    asked = [
        (first, [picture(1)]),
        (f"w1 w2 {mark} w3 w4 {mark} w5 w9", [picture(2, 32, 16), picture(3, 16, 24)]),
        ("w3 w1 w7", []),
        (first, [other]),
        (f"{first} w11 w12 w13 {mark} w6", [picture(1), other]),
    ]
    return Case(
        path,
        [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in asked],
        [generate(model, processor, text, images, MAX_TOKENS) for text, images in asked],
    )


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    with LLM(case.path, kv_memory="4MiB", block_size=4) as llm:
        yield llm


def answers(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.check_integrity()
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_alone_and_after_others_that_begin_alike(case: Case, llm: LLM) -> None:
    """Each prompt by itself, twice: from what others left in the prefix cache too."""
    cached = []
    for prompt, expected in zip([*case.prompts, *case.prompts], case.expected * 2, strict=True):
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        cached.append(output.num_cached_tokens)
        for image in output.images:
            ids = {output.prompt_token_ids[index] for index in image.tokens}
            assert len(ids) == 1, "one token stands for all parts of pictures"
            assert sum(grid.rows * grid.cols for grid in image.grids) == len(image.tokens)
    [first] = llm.tokenize(case.prompts[0]).images
    assert cached[3] <= first.span[0], "another picture's KVs are others"
    assert cached[4] >= first.span[1], "the second turn begins with the first's picture"
    assert min(cached[5:7]) > first.span[1]


def test_batched_with_text(case: Case, llm: LLM) -> None:
    llm.reset_prefix_cache()
    assert answers(llm, case.prompts) == case.expected


@pytest.mark.parametrize("swaps", [False, True])
def test_in_chunks_after_preemption(case: Case, swaps: bool) -> None:
    """Samples in a pool for little more than the longest prompt, in chunks that cut pictures."""
    with LLM(case.path, kv_memory="4MiB", **SMALL) as llm:
        cache = llm._engine.scheduler.ledger
        most = max(len(llm.tokenize(prompt).token_ids) for prompt in case.prompts) + MAX_TOKENS
        size = CacheSize.of_blocks(
            cache.layout, cache.layout.blocks_for(most) * 2, cache.size.max_num_seqs, llm.max_model_len
        )
        room = size.nbytes(cache.layout)
    options: dict[str, Any] = {"kv_offloading_size": "4MiB"} if swaps else {}
    with LLM(case.path, kv_memory=room, **SMALL, **options) as llm:
        if swaps:
            llm._engine.scheduler.memory.swap.costs = FixedCosts(1e-15, 1.0)
        params = SamplingParams(n=2, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answers(llm, case.prompts, params) == [each for each in case.expected for _ in range(2)]
        stats = llm.stats()
        assert (stats.num_swaps if swaps else stats.num_preemptions) > 0, "the pool was meant to be too small"
