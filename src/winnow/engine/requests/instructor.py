"""The instructions of a replay as tokens, within the prompt's chat template."""

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from winnow.chat import apply_template
from winnow.errors import InvalidRequestError
from winnow.eviction import Instruction, Replay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for a question; no template contains it.
_QUESTION = "\x1dthe question\x1d"


class Instructor:
    """Maker of the `Instruction` that asks a model to repeat its context."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._words = lru_cache(maxsize=64)(self._encode)

    def __call__(self, replay: Replay, token_ids: list[int]) -> Instruction:
        first, later = (
            self._words(f"\n\n{words}" if words else "") for words in (replay.first, replay.later)
        )
        before, after = self._template
        written = len(before) if token_ids[: len(before)] == list(before) else 0
        # A prompt with its own system message starts like the template's and then differs.
        templated = written or (len(before) > 1 and token_ids[:2] == list(before[:2]))
        return Instruction(first, later, written, after if templated else ())

    @cached_property
    def _template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The chat template's tokens before and after a user's message; empty without a template."""
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
