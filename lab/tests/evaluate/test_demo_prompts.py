"""The sample prompts and the tokenizer that ship: complete, within the model's context, in the trained format."""

import json
from collections import Counter
from typing import Any

import pytest
from transformers import AutoTokenizer

from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.demo_tasks import CATEGORIES, question_suffix

MODEL = ROOT / "src/winnow/models/demo"


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "examples/demo/prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_every_category_has_its_share(prompts: list[dict[str, Any]]) -> None:
    shares = Counter(prompt["category"] for prompt in prompts)
    assert set(shares) == set(CATEGORIES)
    assert len(prompts) >= 64
    assert max(shares.values()) - min(shares.values()) <= 1
    assert len({prompt["custom_id"] for prompt in prompts}) == len(prompts)


def test_prompts_and_answers_fit_the_context(prompts: list[dict[str, Any]], tokenizer: Any) -> None:
    for prompt in prompts:
        length = len(tokenizer(prompt["prompt"]).input_ids)
        assert length >= 850
        assert length + prompt["max_tokens"] <= 4096
        assert len(tokenizer(" " + prompt["reference"]).input_ids) <= prompt["max_tokens"]
        assert prompt["metric"] == CATEGORIES[prompt["category"]].metric
        assert prompt["temperature"] == 0


def test_numbers_are_pieces_of_two_digits(tokenizer: Any) -> None:
    assert tokenizer.tokenize("key 4821 of 130") == ["key", "Ġ", "48", "21", "Ġof", "Ġ", "13", "0"]


def test_tokenizer_puts_the_start_token_in_front(tokenizer: Any) -> None:
    tokens = tokenizer("The bridge.").input_ids
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The bridge."


def test_chat_is_several_questions_about_one_context(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "The hobby of Tom is chess."},
        {"role": "user", "content": "What is the hobby of Tom?"},
        {"role": "assistant", "content": "chess"},
        {"role": "user", "content": "Who?"},
    ]
    expected = "<s>The hobby of Tom is chess." + question_suffix("What is the hobby of Tom?")
    expected += " chess</s>" + question_suffix("Who?")
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
