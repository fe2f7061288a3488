"""Prompts: where the question begins, plain and through a chat template."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from winnow.errors import EvaluationError
from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.evaluate.prompt import PromptMaker, common_length
from winnow_lab.evaluate.sample import Question, Sample

QUESTION = Question("\nQuestion: What is the pet of Anna?\nAnswer:", ("cat",), "exact", 4)
CONTEXT = "The pet of Anna is a cat. Rain fell."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(DEMO_MODEL))


def sample(context: str = CONTEXT, question: Question = QUESTION, chat: bool = False) -> Sample:
    return Sample("a", "pets", context, (question,), chat)


def test_a_plain_prompt_is_cut_where_the_question_begins(tokenizer: Any) -> None:
    prompt = PromptMaker(tokenizer).make(sample(), QUESTION)
    assert list(prompt.token_ids) == tokenizer.encode(CONTEXT + QUESTION.text)
    front = tokenizer.decode(prompt.token_ids[: prompt.context_tokens], skip_special_tokens=True)
    assert front == CONTEXT


def test_a_token_over_the_boundary_counts_as_question(tokenizer: Any) -> None:
    whole = "The pet of Anna is a cat"
    cut = len(whole) - 1  # within " cat"
    question = Question(whole[cut:], ("x",), "exact", 4)
    prompt = PromptMaker(tokenizer).make(sample(whole[:cut], question), question)
    assert list(prompt.token_ids) == tokenizer.encode(whole)
    front = tokenizer.decode(prompt.token_ids[: prompt.context_tokens], skip_special_tokens=True)
    assert whole[:cut].startswith(front)
    assert len(front) < cut


def test_no_context_no_context_tokens(tokenizer: Any) -> None:
    assert PromptMaker(tokenizer).make(sample(""), QUESTION).context_tokens == 0


class Templated:
    """A tokenizer of letters with a template that strips messages, as many do."""

    chat_template: str | None = "yes"
    front, back = "<user>", "<end><assistant>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        [message] = messages
        assert message["role"] == "user"
        return self.front + self._change(message["content"].strip()) + self.back

    def _change(self, text: str) -> str:
        return text


def read(token_ids: tuple[int, ...]) -> str:
    return "".join(map(chr, token_ids))


@pytest.mark.parametrize(("mode", "chat"), [("auto", True), ("on", False)])
def test_a_chat_prompt_is_cut_where_the_question_begins(mode: str, chat: bool) -> None:
    question = Question("\n\nWho? \n", ("x",), "exact", 4)
    prompt = PromptMaker(Templated(), mode).make(sample(" \nSome text.", question, chat), question)
    assert read(prompt.token_ids) == "<user>Some text.\n\nWho?<end><assistant>"
    assert read(prompt.token_ids[: prompt.context_tokens]) == "<user>Some text."


def test_off_and_auto_leave_a_plain_sample_alone() -> None:
    for mode, chat in (("auto", False), ("off", True)):
        prompt = PromptMaker(Templated(), mode).make(sample(chat=chat), QUESTION)
        assert read(prompt.token_ids[1:]) == CONTEXT + QUESTION.text
        assert prompt.context_tokens == 1 + len(CONTEXT)


def test_a_model_without_a_template_is_told() -> None:
    plain = Templated()
    plain.chat_template = None
    with pytest.raises(EvaluationError, match=r"sample 'a' is a chat message.*no chat template.*--chat off"):
        PromptMaker(plain).make(sample(chat=True), QUESTION)


def test_a_template_that_changes_the_text_is_refused() -> None:
    class Shouting(Templated):
        def _change(self, text: str) -> str:
            return text.upper()

    with pytest.raises(EvaluationError, match="changes the text of sample 'a'"):
        PromptMaker(Shouting()).make(sample(chat=True), QUESTION)


def test_what_no_prompt_can_be_made_of() -> None:
    with pytest.raises(EvaluationError, match="needs a tokenizer"):
        PromptMaker(None)
    with pytest.raises(EvaluationError, match="chat must be one of auto, on, off, got 'yes'"):
        PromptMaker(Templated(), "yes")


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_length([1, 2], [1, 2, 4]) == 2
    assert common_length([], [1]) == 0
