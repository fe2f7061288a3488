"""Beam search: tokens and scores are those of transformers' `generate`, and beams share their blocks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save

from winnow import LLM, SamplingParams
from winnow.errors import CapacityError, InvalidRequestError
from winnow_beams import BeamSearchParams, beam_search

EOS = 1
SEVERAL = [EOS, *range(30, 39)]
PROMPTS = [random.Random(length).choices(range(3, VOCAB), k=length) for length in (1, 37, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save(ARCHITECTURES["llama-gqa"], path)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, Any]) -> Any:
    with LLM(model[0], kv_memory="4MiB", block_size=4, prefill_chunk=32) as llm:
        yield llm
        assert llm._engine.scheduler.ledger.allocator.num_used == 0


def expected(
    model: Any, prompt: list[int], params: BeamSearchParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """What transformers finds: the answers without padding, and their scores."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=params.max_tokens,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
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


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty", "ends"),
    [
        (4, False, 1.0, []),
        (3, False, 1.0, SEVERAL),
        (3, True, 0.0, SEVERAL),
        (3, "never", 2.0, SEVERAL),
        (2, "never", -1.0, [EOS]),
    ],
)
def test_equal_to_transformers(
    model: tuple[Path, Any], llm: LLM, width: int, early_stopping: Any, length_penalty: float, ends: list[int]
) -> None:
    """With ten end tokens most beams end before the limit."""
    params = BeamSearchParams(width, 16, length_penalty, early_stopping, not ends, ends[1:])
    lengths = set()
    for prompt in PROMPTS:
        output = beam_search(llm, prompt, params)
        wanted = expected(model[1], prompt, params, ends)
        assert [answer.tokens for answer in output.sequences] == [tokens for tokens, _ in wanted]
        scores = [answer.score for answer in output.sequences]
        assert scores == pytest.approx([score for _, score in wanted], rel=2e-6, abs=1e-4)  # sums of float32
        lengths |= {len(tokens) for tokens, _ in wanted}
        llm.check_integrity()
    assert len(lengths) > 1 or len(ends) < 2 or length_penalty > 1, "answers were meant to end early"


def test_blocks_are_shared(llm: LLM) -> None:
    """Beams hold the prompt's whole blocks once, and what follows once each at most."""
    prompt, params = PROMPTS[2], BeamSearchParams(4, 20, ignore_eos=True)
    output = beam_search(llm, prompt, params)
    block, length = llm.kv_bytes(1), len(prompt) + params.max_tokens - 2
    whole, total = len(prompt) // 4, -(-length // 4)
    assert output.kv_bytes_unshared == 4 * total * block
    assert total * block < output.kv_bytes_peak <= (whole + 4 * (total - whole)) * block


def test_text_and_one_beam(tmp_path: Path) -> None:
    with LLM(kv_memory="8MiB") as llm:
        [answer] = beam_search(llm, "The garden was", BeamSearchParams(1, 6, ignore_eos=True)).sequences
        [greedy] = llm.generate(
            "The garden was", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        )
        assert (answer.tokens, answer.text) == (greedy.outputs[0].token_ids, greedy.outputs[0].text)


def test_what_cannot_be_searched_is_named(model: tuple[Path, Any], llm: LLM) -> None:
    with pytest.raises(
        InvalidRequestError, match="early_stopping must be true, false or 'never', got 'maybe'"
    ):
        BeamSearchParams(2, early_stopping="maybe")
    with pytest.raises(InvalidRequestError, match=r"beam_width must be at most 32 .* got 33"):
        beam_search(llm, PROMPTS[0], BeamSearchParams(33))
    other = llm.submit(PROMPTS[0])
    with pytest.raises(InvalidRequestError, match="unfinished"):
        beam_search(llm, PROMPTS[0], BeamSearchParams(2))
    llm.abort(other)
    with LLM(model[0], kv_memory="4MiB", max_num_seqs=2) as small:
        with pytest.raises(CapacityError, match=r"beam_width .* 4 beams .* 5 sequences"):
            beam_search(small, PROMPTS[1], BeamSearchParams(4, ignore_eos=True))
        assert not small.has_unfinished


def test_a_fork_may_take_another_last_token(llm: LLM) -> None:
    """Its answer and logprobs are those of a request that was forced to it; tokens before are computed, and stay."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)
    parent = llm.submit(PROMPTS[1], greedy)
    done: dict[str, Any] = {}
    while parent not in done or len(done[parent].token_ids) < 3:
        done |= {output.request_id: output.outputs[0] for output in llm.step()}
    other = next(token for token in done[parent].logprobs[-1] if token != done[parent].token_ids[-1])
    wrong = {**vars(greedy), "forced_tokens": [other, *done[parent].token_ids[1:]]}
    with pytest.raises(InvalidRequestError, match="forced_tokens must begin with the 2 tokens"):
        llm.fork(parent, SamplingParams(**wrong))
    with pytest.raises(InvalidRequestError, match="logprobs must be left out"):
        unknown = next(token for token in range(VOCAB) if token not in done[parent].logprobs[-1])
        llm.fork(
            parent, SamplingParams(**{**wrong, "forced_tokens": [*done[parent].token_ids[:-1], unknown]})
        )
    forced = SamplingParams(**{**wrong, "forced_tokens": [*done[parent].token_ids[:-1], other]})
    child = llm.fork(parent, forced)
    while llm.has_unfinished:
        done |= {output.request_id: output.outputs[0] for output in llm.step()}
    [alone] = llm.generate(PROMPTS[1], forced)
    assert done[child].token_ids == alone.outputs[0].token_ids != done[parent].token_ids
    assert done[child].cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-4)
