"""The words of a replay in a model's tokens, within the chat template that the prompt was written by."""

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from winnow.chat import apply_template
from winnow.errors import InvalidRequestError
from winnow.eviction import Instruction, Replay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for a question; no template writes it.
_QUESTION = "\x1dthe question\x1d"


class Instructor:
    """Says what asks for a repetition; see `Instruction`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._words = lru_cache(maxsize=64)(self._encode)

    def __call__(self, replay: Replay, token_ids: list[int]) -> Instruction:
        first, later = self._words(replay.first), self._words(replay.later)
        before, after = self._template
        written = len(before) if token_ids[: len(before)] == list(before) else 0
        # A prompt with a system message of its own begins like the template's, and then goes another way.
        templated = written or (len(before) > 1 and token_ids[:2] == list(before[:2]))
        return Instruction(first, later, written, after if templated else ())

    @cached_property
    def _template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens that the chat template writes before and after a user's message; nothing where it has none."""
        try:
            prompt = apply_template(self._tokenizer, [{"role": "user", "content": _QUESTION}]).text or ""
        except InvalidRequestError:
            return (), ()
        if prompt.count(_QUESTION) != 1:
            return (), ()
        before, after = prompt.split(_QUESTION)
        return self._encode(before), self._encode(after)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()
