"""A sample and one of its questions as the tokens that the model sees, and where the question begins in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from winnow.errors import EvaluationError
from winnow.prompt.chat import tail_tokens
from winnow.values.checks import check_choice
from winnow_lab.evaluate.sample import Question, Sample

CHAT_MODES = ("auto", "on", "off")


@dataclass(frozen=True)
class Prompt:
    """Tokens of a context and the question behind it; the first `context_tokens` of them do not depend on the question.

    A token that spans context and question counts as question. Text that a chat template puts before the context counts
    as context, what it puts behind the question as question.

    Attributes:
        template_tail: tokens behind the question's last one: the template's, and the prefix of the answer; 0 without a
            template.
        answer_prefix: of these, tokens of the prefix of the answer.
    """

    token_ids: tuple[int, ...]
    context_tokens: int
    template_tail: int = 0
    answer_prefix: int = 0


class PromptMaker:
    """Maker of prompts; `chat` says whether through the model's template, "auto": where the sample says so."""

    def __init__(self, tokenizer: Any, chat: str = "auto") -> None:
        if tokenizer is None:
            raise EvaluationError(
                "an evaluation needs a tokenizer, which the model's directory does not have"
            )
        check_choice("chat", chat, CHAT_MODES, EvaluationError)
        self._tokenizer = tokenizer
        self._chat = chat

    def make(self, sample: Sample, question: Question) -> Prompt:
        if self._chat == "on" or (self._chat == "auto" and sample.chat):
            before, after, tail = self._render(sample, question)
            whole = self._encode(before + after + tail)
            # Tokens of its own, as if the model had begun its answer so. White space that the template ends with is it.
            prefix = question.prefix.lstrip() if tail[-1:].isspace() else question.prefix
            begun = self._encode(prefix) if prefix else []
            return Prompt(
                (*whole, *begun),
                common_length(whole, self._encode(before) if before else []),
                tail_tokens(self._tokenizer, whole, tail) + len(begun),
                len(begun),
            )
        whole = self._tokenizer.encode(sample.context + question.plain)
        front = self._tokenizer.encode(sample.context) if sample.context else []
        return Prompt(tuple(whole), common_length(whole, front))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _render(self, sample: Sample, question: Question) -> tuple[str, str, str]:
        """Context and question as a user's message: what stands before the question, it, and what follows."""
        if not self._tokenizer.chat_template:
            raise EvaluationError(
                f"sample {sample.name!r} is a chat message, and the model has no chat template: "
                "--chat off gives it the plain text"
            )
        content = sample.context + question.text
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            # Answers are short: a model that can think aloud first is asked not to. Other templates ignore it.
            enable_thinking=False,
        )
        # Templates may strip a message, and do no more than that.
        start = text.find(content.strip())
        if start < 0:
            raise EvaluationError(
                f"the model's chat template changes the text of sample {sample.name!r}, so that its question cannot be "
                "found in it: --chat off gives the model the plain text"
            )
        stripped = len(content) - len(content.lstrip())
        cut = start + max(len(sample.context) - stripped, 0)
        end = max(start + len(content.strip()), cut)
        return text[:cut], text[cut:end], text[end:]


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two lists begin with together."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))
