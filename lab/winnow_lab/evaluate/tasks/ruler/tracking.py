"""Variables assigned to each other, to be tracked through a text (vt)."""

import random
import string
from dataclasses import dataclass
from itertools import islice

from winnow_lab.evaluate.demo_tasks.haystack import insert
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import distinct
from winnow_lab.evaluate.tasks.fit import largest_fitting
from winnow_lab.evaluate.tasks.ruler.haystacks import noise
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt

# Shorter than the names asked for, so that the worked example never holds one of them.
_EXAMPLE_LETTERS = 3
_LETTERS = 5


@dataclass(frozen=True)
class Tracking:
    """One chain of variables in noise, behind a worked example; a unit of the haystack is a line of noise beside the
    ones, as many as assignments, that keep these apart.

    Attributes:
        hops: assignments after the first.
        example_tokens: most tokens of the worked example, which has as much noise as fits.
    """

    hops: int = 4
    example_tokens: int = 500
    answer_tokens: int = 30

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        asked = self._tracked(draw.rng("asked"), _LETTERS, size)
        question = Question(
            text=asked.question,
            prefix=asked.prefix,
            references=asked.names,
            metric="match-all",
            max_tokens=self.answer_tokens,
        )
        return Prompt(f"{self._example(draw)}\n\n{asked.context}", (question,))

    def _example(self, draw: Draw) -> str:

        def worked(size: int) -> str:
            tracked = self._tracked(draw.rng("example"), _EXAMPLE_LETTERS, size)
            return f"{tracked.context}{tracked.question}{tracked.prefix} {' '.join(tracked.names)}"

        size = largest_fitting(lambda size: draw.count_tokens(worked(size)), self.example_tokens)
        return worked(size or 0)

    def _tracked(self, rng: random.Random, letters: int, size: int) -> "_Tracked":
        names = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
        chain = tuple(islice(names, self.hops + 1))
        value = str(rng.randrange(10_000, 100_000))
        # The space at the end is RULER's.
        sources = (value, *(f"VAR {name} " for name in chain))
        assignments = [f"VAR {name} = {source}" for name, source in zip(chain, sources, strict=False)]
        around = noise(len(assignments) + size)
        places = sorted(rng.sample(range(len(around)), len(assignments)))
        return _Tracked(chain, value, "\n".join(insert(assignments, around, places)))


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
        return f"\nQuestion: Find all variables that are assigned the value {self.value} in the text above."

    @property
    def prefix(self) -> str:
        """Beginning of the answer."""
        return (
            " Answer: According to the chain(s) of variable assignment in the text above,"
            f" {len(self.names)} variables are assigned the value {self.value}, they are: "
        )
