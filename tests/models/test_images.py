"""Pictures: greedy answers are transformers' own, whatever shares the batch, the cache and the memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

import pytest
from image_models import FAMILIES, WORDS, generate, picture, processor_of, save

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.request_limits import with_spans
from winnow.errors import InvalidRequestError
from winnow.eviction import EvictionPolicy, When
from winnow.eviction.scores import KeyNorm
from winnow.models.load.processor import run_tower
from winnow.sampling.token_table import TokenTable

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
EVERY_8 = EvictionPolicy(KeyNorm(), when=When(after_prefill=True, prefill_every=8))
SMALL = {"block_size": 4, "prefill_chunk": 7, "max_num_seqs": 6}
PREEMPTED = {
    **{"qwen3_vl": True, "qwen3_5": True, "gemma3": True},
    **{"qwen2_5_vl": False, "qwen3_5_moe": False, "gemma4": False, "idefics3": False, "lfm2_vl": False},
}
"""Whether what is preempted is copied to host memory or computed again."""


@dataclass(frozen=True)
class Case:
    path: Path
    prompts: list[Any]
    """One picture, two pictures of other sizes, text alone, the first text with another picture, and a conversation
    that continues the first with a picture in its second turn."""
    expected: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if FAMILIES[request.param].needs:
        pytest.importorskip(FAMILIES[request.param].needs)
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
            shown = sum(grid.rows * grid.cols for grid in image.grids)
            assert shown in ((0, len(image.tokens)) if "intern" in case.path.name else (len(image.tokens),))
    [first] = llm.tokenize(case.prompts[0]).images
    assert cached[3] <= first.span[0], "another picture's KVs are others"
    assert cached[4] >= first.span[1], "the second turn begins with the first's picture"
    assert min(cached[5:7]) > first.span[1]


def test_batched_with_text(case: Case, llm: LLM) -> None:
    llm.reset_prefix_cache()
    assert answers(llm, case.prompts) == case.expected


@pytest.mark.parametrize(("case", "swaps"), PREEMPTED.items(), indirect=["case"])
def test_in_chunks_after_preemption(case: Case, llm: LLM, swaps: bool) -> None:
    """Samples in a pool for little more than the longest prompt, in chunks that cut pictures where these are causal."""
    loaded: Any = llm._engine._executor._model
    layout = loaded.kv_layout(llm.config.cache, 1, SMALL["prefill_chunk"])
    most = max(len(llm.tokenize(prompt).token_ids) for prompt in case.prompts) + MAX_TOKENS
    size = CacheSize.of_blocks(layout, layout.blocks_seen(most) * 11 // 10, SMALL["max_num_seqs"], most)
    options: dict[str, Any] = {"kv_offloading_size": "4MiB"} if swaps else {}
    with LLM(case.path, kv_memory=size.nbytes(layout), max_model_len=most, **SMALL, **options) as small:
        if swaps:
            small._engine.scheduler.memory.swap.costs = SwapCosts(1e-15, 1.0)
        params = replace(GREEDY, n=2)
        assert answers(small, case.prompts, params) == [each for each in case.expected for _ in range(2)]
        stats = small.stats()
        assert (stats.num_swaps if swaps else stats.num_preemptions) > 0, "the pool was meant to be too small"


def test_no_round_within_pictures_that_see_each_other(case: Case, llm: LLM) -> None:
    """Rounds of a prompt come behind them, wherever chunks end."""
    [image, *_] = llm.tokenize(case.prompts[4]).images
    assert bool(image.two_way) == ("gemma" in case.path.name)
    if not image.two_way:
        return
    params = replace(GREEDY, eviction=EVERY_8, kv_budget=12)
    outputs = llm.generate(case.prompts, params, use_tqdm=False)
    with LLM(case.path, kv_memory="4MiB", **SMALL) as other:
        assert answers(other, case.prompts, params) == [each.outputs[0].token_ids for each in outputs]
    report = outputs[4].outputs[0].eviction
    assert report is not None and report.rounds > 1
    with pytest.raises(InvalidRequestError, match="context_tokens must not cut the picture of tokens"):
        llm.generate(case.prompts[0], replace(params, context_tokens=image.span[0] + 3))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One whose pictures have several tiles, with positions of one axis."""
    path = tmp_path_factory.mktemp("idefics3")
    save("idefics3", path)
    with LLM(path, kv_memory="4MiB", block_size=4) as llm:
        yield llm


PICTURED = {"prompt": " ".join(["w1 w2 <image>", *WORDS[3:23]]), "multi_modal_data": {"image": picture(1)}}


def test_the_report_says_what_stayed_of_pictures(small: LLM) -> None:
    [image] = small.tokenize(PICTURED).images
    parts = []
    for protect in ((), (image.span,), ({"images": True},)):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=4,
            ignore_eos=True,
            eviction="winnow-keys",
            kv_budget=36,
            protect=protect,
        )
        [output] = small.generate(PICTURED, params, use_tqdm=False)
        report = output.outputs[0].eviction
        assert report is not None and report.rounds and report.kept_images is not None
        rows = [count for layer in report.kept for count in layer]
        others = report.num_tokens - len(image.tokens)
        assert report.kept_text is not None
        held = report.kept_images * len(image.tokens) + report.kept_text * others
        assert held * len(rows) == pytest.approx(sum(rows))
        parts.append(report.kept_images)
    assert parts[0] < parts[1] == parts[2] == 1.0


def test_tokens_of_pictures_without_one_are_text(small: LLM) -> None:
    """A text holds the token that stands for pictures, and shares a step with a prompt that has one."""
    ids = small.tokenize(PICTURED).token_ids
    [alone] = small.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    [pictured] = small.generate(PICTURED, GREEDY, use_tqdm=False)
    small.reset_prefix_cache()
    both = small.generate([{"prompt_token_ids": ids}, PICTURED], GREEDY, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in both] == [
        each.outputs[0].token_ids for each in (alone, pictured)
    ]
    assert alone.outputs[0].token_ids != pictured.outputs[0].token_ids


def test_a_picture_is_computed_once(small: LLM) -> None:
    features = small._engine._executor.tower
    before = features.num_runs
    prompt = {"prompt": "w9 <image> w8 <image>", "multi_modal_data": {"image": [picture(21), picture(22)]}}
    processor: Any = small._prompts._processor
    pixels = processor._own.image_processor
    with patch.object(pixels, "preprocess", wraps=pixels.preprocess) as preprocess:
        for _ in range(2):
            small.reset_prefix_cache()
            small.generate(prompt, GREEDY, use_tqdm=False)
    assert features.num_runs == before + 2, "the tower"
    assert preprocess.call_count == 4, "the processor, for each picture of each prompt"
    stats = small.stats()
    assert stats.image_bytes == sum(each.nbytes for kept in features._kept.values() for each in kept) > 0


def test_what_is_protected_by_name(small: LLM) -> None:
    """Words stand where the prompt's text has them, the last of them beyond the context."""
    prompt = {"prompt": "w1 w2 <image> w3 w4 w1 w2 w9 w1 w2", "multi_modal_data": {"image": picture(1)}}
    found = small.tokenize(prompt)
    end = len(found.token_ids)

    def spans(*protect: Any) -> Any:
        params = SamplingParams(protect=protect, context_tokens=end - 2)
        return with_spans(params, found.token_ids, found.images, TokenTable(small.tokenizer)).protect

    assert spans({"text": "w1 w2"}, (3, 4)) == ((0, 2), (end - 5, end - 3), (3, 4))
    assert spans({"images": True}) == (found.images[0].span,)
    with pytest.raises(InvalidRequestError, match="protect names text 'w7', and the prompt has none"):
        spans({"text": "w7"})
    with pytest.raises(InvalidRequestError, match="protect must hold pairs"):
        spans({"images": False})


def test_others_go_on_while_the_tower_runs(small: LLM) -> None:
    """Pictures of one size that wait together are computed together."""
    free, begun, batches = Event(), Event(), list[int]()
    one = {"prompt": "w1 <image> w5", "multi_modal_data": {"image": picture(31)}}
    two = {"prompt": "w1 w2 <image> w4 <image>", "multi_modal_data": {"image": [picture(32), picture(33)]}}
    tower: Any = small._engine._executor.tower

    def blocked(model: Any, images: Any) -> Any:
        batches.append(len(images))
        begun.set()
        assert free.wait(30)
        return run_tower(model, images)

    found: dict[int, Any] = {}
    waiting = [
        Thread(target=lambda number, prompt: found.update({number: answers(small, [prompt])}), args=each)
        for each in enumerate((one, two))
    ]
    with patch("winnow.executor.image_features.run_tower", blocked):
        waiting[0].start()
        assert begun.wait(30)
        waiting[1].start()
        for _ in range(100):
            small.generate("w3 w1 w7", GREEDY, use_tqdm=False)
            if len(tower._queue) == 2:
                break
        assert small.stats().num_waiting == 2 and not found
        free.set()
        for each in waiting:
            each.join(30)
    assert batches == [1, 2]
    small.reset_prefix_cache()
    tower._kept.clear()
    tower.nbytes = 0
    assert [found[0], found[1]] == [answers(small, [one]), answers(small, [two])]


def test_a_picture_that_cannot_be_computed_fails_alone(small: LLM) -> None:
    pictured = {"prompt": "w1 <image> w2", "multi_modal_data": {"image": picture(41)}}
    with patch("winnow.executor.image_features.run_tower", side_effect=RuntimeError("no such size")):
        params = replace(GREEDY, n=2)
        failed, other = small.generate([pictured, "w3 w1 w7"], params, use_tqdm=False)
    assert [each.finish_reason for each in failed.outputs] == ["error"] * 2
    assert failed.error == "image cannot be computed: RuntimeError: no such size"
    assert other.error is None
    small.check_integrity()
    assert small.generate(pictured, GREEDY, use_tqdm=False)[0].error is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            PICTURED | {"prompt": "w1"},
            "prompt must hold '<image>' once for each of its 1 images, got it 0 times",
        ),
        (PICTURED | {"multi_modal_data": {"video": [1]}}, "multi_modal_data must be .* got 'video'"),
    ],
)
def test_refused_prompts(small: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        small.generate(prompt, GREEDY)


def test_policies_that_cannot_act_on_pictures(small: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="repeats a context as token ids"):
        small.generate(PICTURED, SamplingParams(eviction="kvzip", compression=2.0))
    save("qwen3_vl", tmp_path)
    prompt = {"prompt": f"w1 {FAMILIES['qwen3_vl'].mark} w2", "multi_modal_data": {"image": picture(1)}}
    with LLM(tmp_path, kv_memory="4MiB", eviction="winnow-keys", kv_budget=40) as llm:
        with pytest.raises(InvalidRequestError, match="before rotation"):
            llm.generate(prompt, SamplingParams(eviction="winnow-keys", kv_budget=40))
        report = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].eviction
        assert report is not None and report.policy != "winnow-keys"
    with LLM(tmp_path, kv_memory="4MiB", language_model_only=True) as llm:
        with pytest.raises(InvalidRequestError, match="images cannot be read: language_model_only is set"):
            llm.generate(prompt, GREEDY)
        assert len(llm.generate("w1 w2", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == MAX_TOKENS
