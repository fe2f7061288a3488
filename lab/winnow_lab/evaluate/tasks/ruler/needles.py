"""Needles in a haystack: sentences that give keys their values, hidden in text or among others of their kind."""

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks.haystack import insert, scatter
from winnow_lab.evaluate.demo_tasks.words import ADJECTIVES, NOUNS
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.ruler.documents import Draw, Prompt

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Even depths in percent, of which needles in prose get different ones."""
Kind = Literal["words", "numbers", "uuids"]


def needle(noun: str, key: str, value: str) -> str:
    """The sentence that gives a key one of its values; `noun` says in the plural what the value is."""
    return f"One of the special magic {noun} for {key} is: {value}."


def drawn_keys(rng: random.Random, kind: Kind) -> Iterator[str]:
    """Different keys: pairs of an adjective and a noun, joined by a hyphen, or UUIDs."""
    if kind == "uuids":
        while True:
            yield drawn_value(rng, "uuids")
    pairs = len(ADJECTIVES) * len(NOUNS)
    # A generator of its own: values that are drawn between the keys do not change them.
    for number in shuffled(random.Random(rng.getrandbits(64)), pairs):
        adjective, noun = divmod(number, len(NOUNS))
        yield f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
    raise EvaluationError(
        f"the haystack needs more keys than the {pairs:,} pairs of words that there are: ask for fewer tokens"
    )


def drawn_value(rng: random.Random, kind: Kind) -> str:
    """A number of 7 digits or a UUID of version 4."""
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    assert kind == "numbers", "words are keys alone"
    return str(rng.randrange(10**6, 10**7))


def opening(sentences: Sequence[str], start: int, words: int) -> list[str]:
    """Sentences from the one at `start` on, of the wanted number of words, the last one cut.

    After the end of the text they continue with its beginning, as often as it takes.
    """
    taken: list[str] = []
    place = start
    while words > 0:
        own = sentences[place % len(sentences)].split(" ")
        taken.append(" ".join(own[:words]))
        words -= len(own)
        place += 1
    return taken


def hide_in_sentences(rng: random.Random, needles: Sequence[str], sentences: Sequence[str]) -> list[str]:
    """Prose with needles between its sentences, in their order, at different depths of `DEPTHS`."""
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    return insert(needles, sentences, [len(sentences) * depth // 100 for depth in depths])


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
            others = (needle(self.value_kind, key, drawn_value(rng, self.value_kind)) for key in names)
            around = [NOISE] * size if self.haystack == "noise" else list(islice(others, size))
            text = "\n".join(scatter(draw.rng("places"), lines, around))
        noun = self._noun
        said = f"A special magic {noun} is" if self._one else f"Some special magic {noun} are"
        instruction = (
            f"{said} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {noun} afterwards.\n"
        )
        return Prompt(instruction + text, tuple(self._questions(draw, hidden)))

    def _questions(self, draw: Draw, hidden: dict[str, tuple[str, ...]]) -> Iterator[Question]:
        keys = list(hidden)
        for first in range(0, min(len(keys), draw.questions * self.asked), self.asked):
            asked = keys[first : first + self.asked]
            about = f"special magic {self._noun} for {enumeration(asked)} mentioned in the provided text"
            yield Question(
                text=f"\nWhat {'is' if self._one else 'are all'} the {about}?",
                prefix=f" The {about} {'is' if self._one else 'are'}",
                references=tuple(value for key in asked for value in hidden[key]),
                metric="match-all",
                max_tokens=self.answer_tokens,
            )

    @property
    def _one(self) -> bool:
        return self.values * self.asked == 1

    @property
    def _noun(self) -> str:
        return self.value_kind.removesuffix("s") if self._one else self.value_kind


def enumeration(names: list[str]) -> str:
    """Names as a sentence lists them: "a", "a, and b", "a, b, and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
