"""Tokens of answered turns are repeated, however a tokenizer would cut their text."""

from typing import Any, ClassVar

import pytest

from winnow.sampling.token_table import TokenTable
from winnow.sampling.turns import Turns


class Letters:
    """A tokenizer of single letters that knows pairs of them, and takes them where it can; <end> is special."""

    pairs: ClassVar = {"ab": 1000, "yz": 1001}
    all_special_ids = (1,)

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        while text:
            width = 5 if text.startswith("<end>") else 2 if text[:2] in self.pairs else 1
            found.append(1 if width == 5 else self.pairs[text[:2]] if width == 2 else ord(text[0]))
            text = text[width:]
        return found

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        names = {1: "<end>", **{token: text for text, token in self.pairs.items()}}
        return "".join(names.get(token) or chr(token) for token in token_ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return "<end>"


ASK = "question\nanswer:"
ANSWER = [ord(each) for each in "abyz"]  # the model wrote it letter by letter


@pytest.fixture
def tokenizer() -> Letters:
    return Letters()


@pytest.fixture
def turns(tokenizer: Letters) -> Turns:
    found = Turns(TokenTable(tokenizer))
    found.add("a", ASK, tokenizer.encode(ASK), 7, [*ANSWER, 1])
    return found


def prompt_of(turns: Turns, tokenizer: Letters, text: str, tenant: str | None = "a") -> list[int]:
    return turns.encode(tenant, text, "\nanswer:", tokenizer.encode)


@pytest.mark.parametrize("answer", ["abyz", " abyz", "\nabyz \n"])
def test_an_answer_keeps_its_tokens(turns: Turns, tokenizer: Letters, answer: str) -> None:
    more = "<end>ab again\nanswer:"
    known = [*tokenizer.encode(ASK), *ANSWER]
    assert prompt_of(turns, tokenizer, ASK + answer + more) == known + tokenizer.encode(more)
    # The next turn builds on it.
    second = prompt_of(turns, tokenizer, ASK + answer + more)
    turns.add("a", ASK + answer + more, second, 7, ANSWER)
    third = prompt_of(turns, tokenizer, ASK + answer + more + " abyz" + more)
    assert third == second + ANSWER + tokenizer.encode(more)


@pytest.mark.parametrize("text", ["abxz<end>more", "abyz.<end>more", "ab yz<end>more", "abyz more"])
def test_what_has_changed_is_read_anew(turns: Turns, tokenizer: Letters, text: str) -> None:
    assert prompt_of(turns, tokenizer, ASK + text) == tokenizer.encode(ASK + text)


def test_space_within_a_turn_matters(turns: Turns, tokenizer: Letters) -> None:
    text = ASK.replace("\n", " \n") + "abyz<end>"
    assert prompt_of(turns, tokenizer, text) == tokenizer.encode(text)


def test_tenants_share_nothing(turns: Turns, tokenizer: Letters) -> None:
    text = ASK + "abyz<end>"
    assert prompt_of(turns, tokenizer, text) != tokenizer.encode(text)
    for other in ("b", None):
        assert prompt_of(turns, tokenizer, text, other) == tokenizer.encode(text)


def test_the_least_recently_used_go_first(tokenizer: Letters) -> None:
    texts = [f"{n}{ASK}" for n in range(9)]
    turns = Turns(TokenTable(tokenizer), max_tokens=3 * (len(texts[0]) + 4))
    for text in texts:
        turns.add(None, text, tokenizer.encode(text), 7, ANSWER)
        assert prompt_of(turns, tokenizer, texts[0] + "abyz<end>", None)[len(texts[0]) :][:4] == ANSWER
    known = [prompt_of(turns, tokenizer, each + "abyz<end>", None)[-2] == ANSWER[-1] for each in texts]
    assert known == [True, *[False] * 6, True, True]
