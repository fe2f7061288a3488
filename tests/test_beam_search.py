"""Beam search: tokens and scores are those of transformers' `generate`, and beams share their blocks."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save

from winnow import LLM, BeamSearchParams, SamplingParams
from winnow.cache import CacheSize
from winnow.cache.layout import ceil_div
from winnow.errors import CapacityError, InvalidRequestError

EOS = 1
SEVERAL = [EOS, *range(30, 39)]
LENGTHS = (1, 16, 37, 90)
PROMPTS = [random.Random(length).choices(range(3, VOCAB), k=length) for length in LENGTHS]


@pytest.fixture(scope="module", params=["llama-gqa", "mistral-window", "gemma3", "gpt2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save(ARCHITECTURES[request.param], path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save(ARCHITECTURES["llama-gqa"], path)


@pytest.fixture(scope="module")
def llm(llama: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(llama[0], kv_memory="4MiB") as llm:
        yield llm
        assert llm._engine.scheduler.ledger.allocator.num_used == 0


def expected(
    model: Any, prompt: list[int], params: SamplingParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """What transformers finds: the answers without padding, and their scores."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=params.max_tokens,
        num_beams=params.n,
        num_return_sequences=params.n,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=ends or None,
        pad_token_id=2,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for tokens, score in zip(
        output.sequences[:, len(prompt) :].tolist(), output.sequences_scores, strict=True
    ):
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        found.append((tokens[:end], float(score)))
    return found


def beams(n: int, max_tokens: int = 12, **others: Any) -> SamplingParams:
    return SamplingParams(n=n, temperature=0, max_tokens=max_tokens, use_beam_search=True, **others)


def assert_equal(output: Any, wanted: list[tuple[list[int], float]], params: SamplingParams) -> None:
    assert [answer.token_ids for answer in output.outputs] == [tokens for tokens, _ in wanted]
    for answer, (tokens, score) in zip(output.outputs, wanted, strict=True):
        assert answer.cumulative_logprob / len(tokens) ** params.length_penalty == pytest.approx(
            score, rel=1e-5, abs=1e-4
        )


@pytest.mark.parametrize("width", [2, 4])
def test_equal_to_transformers_on_architectures(case: tuple[Path, Any], width: int) -> None:
    path, model = case
    params = beams(width, ignore_eos=True)
    with LLM(path, kv_memory="4MiB", block_size=4, prefill_chunk=32) as llm:
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            assert_equal(output, expected(model, prompt, params, []), params)
        llm.check_integrity()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    ("length_penalty", "ends"), [(-1.0, [EOS]), (0.0, SEVERAL), (1.0, [EOS]), (1.0, SEVERAL), (2.0, SEVERAL)]
)
def test_answers_that_end_early(
    llama: tuple[Path, Any], llm: LLM, early_stopping: bool | str, length_penalty: float, ends: list[int]
) -> None:
    """With ten end tokens most beams end before the limit."""
    params = beams(
        3, 20, stop_token_ids=ends[1:], length_penalty=length_penalty, early_stopping=early_stopping
    )
    outputs = llm.generate(PROMPTS, params)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert_equal(output, expected(llama[1], prompt, params, ends), params)
    if len(ends) > 1:
        assert {answer.finish_reason for output in outputs for answer in output.outputs} >= {"stop"}
    llm.check_integrity()


def test_many_at_once_beside_others(llama: tuple[Path, Any], llm: LLM) -> None:
    searched, plain = beams(4, ignore_eos=True), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    params = [searched, plain] * len(PROMPTS)
    outputs = llm.generate([prompt for prompt in PROMPTS for _ in range(2)], params)
    for i, prompt in enumerate(PROMPTS):
        assert_equal(outputs[2 * i], expected(llama[1], prompt, searched, []), searched)
        assert outputs[2 * i + 1].outputs[0].token_ids == llm.generate(prompt, plain)[0].outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_beams_find_the_same(llama: tuple[Path, Any], caching: bool) -> None:
    """A pool for one search at its worst."""
    path, model = llama
    params = beams(4, 40, ignore_eos=True)
    prompts = [PROMPTS[3][i : i + 30] for i in range(6)]
    options = {"block_size": 4, "prefill_chunk": 16, "max_model_len": 128, "enable_prefix_caching": caching}
    with LLM(path, kv_memory="4MiB", max_num_seqs=24, **options) as llm:
        layout = llm._engine.scheduler.ledger.layout
    # Whole blocks of the prompt once, and the rest of 69 tokens for each beam.
    size = CacheSize.of_blocks(layout, layout.rows_per_seq * (7 + 4 * 11), 24, 128)
    with LLM(path, kv_memory=size.nbytes(layout), max_num_seqs=24, **options) as llm:
        ids = [llm.submit(prompt, params) for prompt in prompts]
        found = {}
        while llm.has_unfinished:
            found |= {output.request_id: output for output in llm.step() if output.finished}
            llm.check_integrity()
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert_equal(found[request_id], expected(model, prompt, params, []), params)
        assert llm.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert llm._engine.scheduler.ledger.allocator.num_used == 0


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_preempted_beams_under_a_policy_come_to_their_ends(llama: tuple[Path, Any], policy: str) -> None:
    """Each search needs copies of shared blocks for its rounds, and memory lacks for them while others run."""
    options = {"block_size": 4, "prefill_chunk": 32, "max_model_len": 128, "max_num_seqs": 24}
    params = beams(4, 24, ignore_eos=True, eviction=policy, kv_budget=60)
    prompts = [PROMPTS[3][i : i + 70] for i in range(6)]
    with LLM(llama[0], kv_memory="4MiB", **options) as llm:
        layout = llm._engine.scheduler.ledger.layout
    size = CacheSize.of_blocks(layout, layout.rows_per_seq * 88, 24, 128)
    with LLM(llama[0], kv_memory=size.nbytes(layout), **options) as llm:
        ids = [llm.submit(prompt, params) for prompt in prompts]
        found: dict[str, Any] = {}
        for _ in range(1500):
            found |= {output.request_id: output for output in llm.step() if output.finished}
            llm.check_integrity()
            if not llm.has_unfinished:
                break
        assert found.keys() == set(ids), "searches give way to each other for ever"
        assert llm.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert all(output.error is None and len(output.outputs) == 4 for output in found.values())


def test_blocks_are_shared(llama: tuple[Path, Any]) -> None:
    """Beams never hold more than the prompt's whole blocks once, and what follows once each."""
    with LLM(llama[0], kv_memory="4MiB", block_size=4, enable_prefix_caching=False) as llm:
        ledger = llm._engine.scheduler.ledger
        prompt, width, max_tokens = PROMPTS[3], 4, 20
        llm.generate(prompt, beams(width, max_tokens, ignore_eos=True))
        whole, total = len(prompt) // 4, ceil_div(len(prompt) + max_tokens - 1, 4)
        assert ledger.peak_blocks <= ledger.layout.rows_per_seq * (whole + width * (total - whole))
        assert ledger.peak_blocks < ledger.layout.rows_per_seq * total * 2
        assert ledger.allocator.num_used == 0


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "tova", "streaming", "winnow"])
def test_under_a_policy_an_answer_is_scored_as_if_it_were_alone(llm: LLM, policy: str) -> None:
    """Each answer's logprob is that of the same tokens forced upon a request of its own under the policy."""
    chosen = {"eviction": policy, "kv_budget": 48}
    [output] = llm.generate(PROMPTS[3], beams(3, 12, ignore_eos=True, **chosen))
    llm.check_integrity()
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        forced = SamplingParams(
            temperature=0,
            max_tokens=12,
            ignore_eos=True,
            logprobs=0,
            forced_tokens=answer.token_ids,
            **chosen,
        )
        [alone] = llm.generate(PROMPTS[3], forced)
        assert answer.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-4)


def test_beam_search_has_vllms_names(llama: tuple[Path, Any], llm: LLM) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    params = beams(3, 8, ignore_eos=True)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        wanted = expected(llama[1], prompt, params, [])
        assert [each.tokens for each in output.sequences] == [prompt + tokens for tokens, _ in wanted]
        assert [each.score for each in output.sequences] == pytest.approx([s for _, s in wanted], abs=1e-4)
        assert output.sequences[0].cum_logprob == pytest.approx(8 * output.sequences[0].score)
        assert {each.finish_reason for each in output.sequences} == {"length"}


def test_one_beam_is_greedy(llm: LLM) -> None:
    [search] = llm.generate(PROMPTS[2], beams(1, ignore_eos=True))
    [greedy] = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert search.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_texts_of_the_demo_model() -> None:
    with LLM(kv_memory="8MiB") as llm:
        [output] = llm.beam_search("The garden was", BeamSearchParams(beam_width=3, max_tokens=6))
        assert len(output.sequences) == 3
        assert all(each.text for each in output.sequences)


def test_a_search_can_be_aborted_at_any_step(llm: LLM) -> None:
    for steps in range(5):
        request_id = llm.submit(PROMPTS[3], beams(4, ignore_eos=True))
        for _ in range(steps):
            assert llm.step() == [], "a search has one output, at its end"
        output = llm.abort(request_id)
        assert output is not None and output.outputs[0].finish_reason == "abort"
        llm.check_integrity()
        assert not llm.has_unfinished


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, "temperature must be 0 with use_beam_search, got 0.5"),
        ({"stop": "x"}, "stop must be left out with use_beam_search"),
        ({"repetition_penalty": 1.5}, "repetition_penalty must be left out .* got 1.5"),
        ({"logprobs": 1}, "logprobs must be left out .* got 1"),
        ({"forced_tokens": [5]}, "forced_tokens must be left out"),
        ({"early_stopping": "maybe"}, "early_stopping must be true, false or 'never', got 'maybe'"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"compression": [2.0, 4.0]}, "compression must be one number"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty needs use_beam_search"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping needs use_beam_search"),
    ],
)
def test_bad_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        replace(beams(2), **changes)


def test_what_does_not_fit_is_named(llama: tuple[Path, Any], llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"n must be at most 32 with use_beam_search .* got 33"):
        llm.generate(PROMPTS[0], beams(33))
    with pytest.raises(InvalidRequestError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=3)
    with (
        LLM(llama[0], kv_memory="1MiB", max_num_seqs=4) as small,
        pytest.raises(
            CapacityError, match=r"5 beams .* need 5 sequences at a time \(max_num_seqs\), .* are 4"
        ),
    ):
        small.generate(PROMPTS[0], beams(5))
    with (
        LLM(llama[0], kv_memory=400_000, max_num_seqs=4) as small,
        pytest.raises(CapacityError, match=r"4 beams of up to 389 tokens need \d+ blocks, and there are \d+"),
    ):
        small.generate(PROMPTS[3], beams(4, 300))
    refused = pytest.raises(InvalidRequestError, match="use_beam_search needs engine=paged")
    with LLM(llama[0], kv_memory="4MiB", engine="padded") as padded, refused:
        padded.generate(PROMPTS[0], beams(2))
    request_id = llm.submit(PROMPTS[0], beams(2))
    with pytest.raises(InvalidRequestError, match="beam search"):
        llm.fork(request_id)
    llm.abort(request_id)
