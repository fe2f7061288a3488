"""Conversations whose turns compute their own new tokens alone."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.outputs import RequestOutput

BLOCK = 16
OPTIONS: dict[str, Any] = {"kv_memory": "32MiB", "max_num_seqs": 4, "block_size": BLOCK}
QUESTIONS = ["Tell me a story about a dog and a cat.", "And then?", "Where did the cat go?", "Why?"]
ANSWER = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**OPTIONS, enable_prefix_caching=False) as llm:
        yield llm


def converse(llm: LLM, questions: list[str], params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """The outputs of a conversation's turns."""
    messages: list[dict[str, str]] = []
    outputs = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params, **options)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        outputs.append(output)
    llm.check_integrity()
    return outputs


def known_tokens(output: RequestOutput) -> list[int]:
    return list(output.prompt_token_ids) + list(output.outputs[0].token_ids)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_turns_compute_what_is_new(llm: LLM, plain: LLM, seed: int | None) -> None:
    """The model's own tokens are read again, also where the tokenizer would cut their text otherwise."""
    params = ANSWER if seed is None else replace(ANSWER, temperature=2.0, seed=seed)
    outputs = converse(llm, QUESTIONS, params)
    for before, after in pairwise(outputs):
        known = known_tokens(before)
        assert after.prompt_token_ids[: len(known)] == known
        assert after.num_cached_tokens == len(known) - 1  # the last token was sampled and never computed
    for output in outputs:
        [expected] = plain.generate([list(output.prompt_token_ids)], params)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.tokenizer is not None
    encoded = [llm.tokenizer.encode(str(each.prompt), add_special_tokens=False) for each in outputs]
    assert encoded != [each.prompt_token_ids for each in outputs]


def test_a_changed_turn_is_known_up_to_the_change(llm: LLM) -> None:
    first, second = converse(llm, ["Who was the first king of the hill?", "And the second one?"], ANSWER)
    messages = [
        {"role": "user", "content": "Who was the first king of the hill?"},
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And the second queen?"},
    ]
    [changed] = llm.chat(messages, ANSWER)
    pairs = zip(changed.prompt_token_ids, second.prompt_token_ids, strict=False)
    common = next(at for at, (one, other) in enumerate(pairs) if one != other)
    assert changed.num_cached_tokens == common > len(known_tokens(first)) + 2
