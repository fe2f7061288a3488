"""Drafts can never change an answer, wherever they come from."""

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.engine.requests.request import Sequence
from winnow.outputs import RequestOutput

OPTIONS: dict[str, Any] = {
    "kv_memory": "1536KiB",
    "block_size": 8,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 128,
    "prefill_chunk": 32,
    "seed": 3,
}
CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "n": 2},
    {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.9, "stop": ["e", "."], "min_tokens": 3},
    {"temperature": 1.0, "structured_outputs": {"regex": "(yes|no|maybe)( [a-z]{1,6}){2}"}, "logprobs": 1},
    {"temperature": 0.5, "structured_outputs": {"json": {"type": "object", "required": ["a"]}}},
    {"temperature": 0.9, "bad_words": ["a"], "logit_bias": {5: 1.5}},
    {"temperature": 0, "eviction": "snapkv", "kv_budget": 40},
    {"temperature": 0.6, "eviction": "h2o", "kv_budget": 24, "logprobs": 1},
    {"temperature": 0.6, "eviction": "streaming", "kv_budget": 24},
]


class Stub:
    """Source that knows the answers, or does not.

    Args:
        answers: by prompt and sample.
        change: of the tokens that follow.
    """

    used_bytes, reads_cache, price = 0, False, 0.0

    def __init__(
        self,
        answers: Mapping[tuple[tuple[int, ...], int], list[int]],
        change: Callable[[list[int]], list[int]],
    ) -> None:
        self.answers, self.change = answers, change

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        return most

    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = {}
        for sequence, count in counts.items():
            prompt = tuple(sequence.request.prompt_token_ids)
            rest = self.answers[prompt, sequence.index][sequence.num_output_tokens :]
            found[sequence] = self.change((rest + [7] * count)[:count])
        return found


def requests(llm: LLM) -> Iterator[tuple[list[int], SamplingParams]]:
    """48 requests whose prompts begin alike in part."""
    random = Random(5)
    ids = llm.get_tokenizer().encode("The quick brown fox, and the lazy dog: 12 of 40. ")
    shared = [random.choices(ids, k=24) for _ in range(3)]
    for number in range(48):
        prompt = random.choice(shared) + random.choices(ids, k=random.randint(2, 40))
        params = KINDS[number % len(KINDS)]
        yield prompt, SamplingParams(max_tokens=random.randint(4, 24), seed=number, **params)


def answers(llm: LLM, source: Stub | None) -> list[RequestOutput]:
    """Outputs of all requests, with the engine's invariants checked now and then."""
    if source is not None:
        llm._engine.scheduler.drafts._source = source
    for number, (prompt, params) in enumerate(requests(llm)):
        llm.submit(prompt, params, request_id=str(number))
    finished: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        finished |= {output.request_id: output for output in llm.step() if output.finished}
        if llm.stats().num_steps % 32 == 0:
            llm.check_integrity()
    return [finished[name] for name in sorted(finished, key=int)]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    with LLM(**OPTIONS) as llm:
        return answers(llm, None)


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_drafts_never_change_an_answer(plain: list[RequestOutput], kind: str) -> None:
    known = {
        (tuple(output.prompt_token_ids), each.index): list(each.token_ids)
        for output in plain
        for each in output.outputs
    }
    random = Random(1)
    change: dict[str, Callable[[list[int]], list[int]]] = {
        "right": lambda tokens: tokens,
        "wrong": lambda tokens: [token + 1 if token < 60 else token - 1 for token in tokens],
        "random": lambda tokens: [token if random.random() < 0.6 else 9 for token in tokens],
    }
    with LLM(speculative_config=CONFIG, **OPTIONS) as llm:
        found = answers(llm, Stub(known, change[kind]))
        stats = llm.stats()
    assert stats.num_preemptions > 0 < stats.num_rounds and stats.cached_tokens > 0
    assert stats.num_draft_tokens > 250
    if kind == "right":
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0
    for one, other in zip(found, plain, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason, mine.stop_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
                theirs.stop_reason,
            )
            for got, wanted in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert list(got) == list(wanted)
                for token in got:
                    assert got[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)
