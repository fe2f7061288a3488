"""Variables assigned to each other, to be tracked through a text (vt)."""

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from winnow.evaluate.demo_tasks.haystack import scatter
from winnow.evaluate.sample import Question
from winnow.evaluate.tasks.draws import distinct
from winnow.evaluate.tasks.ruler.haystacks import noise
from winnow.evaluate.tasks.ruler.recipe import Draw, Prompt

_EXAMPLE_LINES = 5


@dataclass(frozen=True)
class Tracking:
    """One chain of variables in noise, behind a worked example; a unit of the haystack is a line of noise.

    Attributes:
        hops: assignments after the first.
    """

    hops: int = 4
    answer_tokens: int = 30

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        rng = draw.rng("names")
        names = distinct(lambda: _name(rng))
        example = self._text(draw.rng("example"), names, _value(rng), _EXAMPLE_LINES)
        asked = self._text(draw.rng("places"), names, _value(rng), size)
        question = Question(
            text=asked.question, references=asked.names, metric="match-all", max_tokens=self.answer_tokens
        )
        worked = f"{example.context}{example.question}{' '.join(example.names)}\n\n"
        return Prompt(worked + asked.context, (question,))

    def _text(self, rng: random.Random, names: Iterator[str], value: str, lines: int) -> "_Tracked":
        chain = tuple(islice(names, self.hops + 1))
        sources = (value, *(f"VAR {name}" for name in chain))
        assignments = [f"VAR {name} = {source}" for name, source in zip(chain, sources, strict=False)]
        return _Tracked(chain, value, "\n".join(scatter(rng, assignments, noise(lines))))


@dataclass(frozen=True)
class _Tracked:
    """A text with one chain: `names` in their order, all of which get `value`."""

    names: tuple[str, ...]
    value: str
    text: str

    @property
    def context(self) -> str:
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + self.text
        )

    @property
    def question(self) -> str:
        return (
            f"\nQuestion: Find all variables that are assigned the value {self.value} in the text above."
            " Answer: According to the chain(s) of variable assignment in the text above,"
            f" {len(self.names)} variables are assigned the value {self.value}, they are: "
        )


def _name(rng: random.Random) -> str:
    """Five capital letters."""
    return "".join(rng.choices(string.ascii_uppercase, k=5))


def _value(rng: random.Random) -> str:
    """Five digits."""
    return str(rng.randrange(10_000, 100_000))
