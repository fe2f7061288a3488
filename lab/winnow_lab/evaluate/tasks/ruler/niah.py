"""Needles in a haystack: sentences that give keys their values, hidden in text or among others of their kind."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from winnow_lab.evaluate.demo_tasks.haystack import scatter
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.ruler.haystacks import hide_in_sentences, noise, opening
from winnow_lab.evaluate.tasks.ruler.needles import Kind, drawn_keys, drawn_value, needle
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack; a unit of it is a line (noise, needles) or a word (essay).

    Several questions ask for different keys. Among needles there are as many as it takes, else those that the recipe
    hides anyway.

    Attributes:
        haystack: the same line over and over, needles with other keys, or prose.
        key_kind, value_kind: what keys and values look like.
        keys: hidden, of `values` values each.
        asked: keys that a question asks for.
    """

    haystack: Literal["noise", "needles", "essay"]
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1
    answer_tokens: int = 128

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        rng = draw.rng("needles")
        names = drawn_keys(rng, self.key_kind)
        count = max(self.keys, draw.questions) if self.haystack == "needles" else self.keys
        hidden = {
            key: tuple(drawn_value(rng, self.value_kind) for _ in range(self.values))
            for key in islice(names, count)
        }
        lines = [needle(self.value_kind, key, value) for key, values in hidden.items() for value in values]
        rng.shuffle(lines)
        if self.haystack == "essay":
            start = draw.rng("start").randrange(len(draw.materials.essay))
            sentences = opening(draw.materials.essay, start, size)
            text = " ".join(hide_in_sentences(draw.rng("places"), lines, sentences))
        else:
            around = noise(size) if self.haystack == "noise" else list(islice(self._others(rng, names), size))
            text = "\n".join(scatter(draw.rng("places"), lines, around))
        return Prompt(self._instruction + text, tuple(self._questions(draw, hidden)))

    def _others(self, rng: random.Random, names: Iterator[str]) -> Iterator[str]:
        for key in names:
            yield needle(self.value_kind, key, drawn_value(rng, self.value_kind))

    def _questions(self, draw: Draw, hidden: dict[str, tuple[str, ...]]) -> Iterator[Question]:
        keys = list(hidden)
        for first in range(0, min(len(keys), draw.questions * self.asked), self.asked):
            asked = keys[first : first + self.asked]
            text, prefix = self._question(enumeration(asked))
            yield Question(
                text=text,
                prefix=prefix,
                references=tuple(value for key in asked for value in hidden[key]),
                metric="match-all",
                max_tokens=self.answer_tokens,
            )

    @property
    def _one(self) -> bool:
        return self.values * self.asked == 1

    @property
    def _instruction(self) -> str:
        noun = self.value_kind.removesuffix("s") if self._one else self.value_kind
        hidden = f"A special magic {noun} is" if self._one else f"Some special magic {noun} are"
        return (
            f"{hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards.\n"
        )

    def _question(self, query: str) -> tuple[str, str]:
        noun, verb = (self.value_kind.removesuffix("s"), "is") if self._one else (self.value_kind, "are")
        about = f"special magic {noun} for {query} mentioned in the provided text"
        return f"\nWhat {verb if self._one else 'are all'} the {about}?", f" The {about} {verb}"


def enumeration(names: list[str]) -> str:
    """Return names as a sentence lists them: "a", "a, and b", "a, b, and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
