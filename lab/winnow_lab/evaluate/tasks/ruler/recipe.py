"""Interface of RULER's recipes."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.task import CountTokens

if TYPE_CHECKING:
    from winnow_lab.evaluate.tasks.ruler.documents import Materials


@dataclass(frozen=True)
class Draw:
    """One sample of a recipe before its haystack has a size.

    Attributes:
        seed: of the evaluation.
        recipe: its name.
        tokens: length of prompt and answer together.
        number: of the sample, from 0.
        questions: asked of one context; a recipe may ask fewer.
        materials: what haystacks are made of.
        count_tokens: tokens of a text, for parts of a prompt that have a length of their own.
    """

    seed: int
    recipe: str
    tokens: int
    number: int
    questions: int
    materials: "Materials"
    count_tokens: CountTokens

    def rng(self, purpose: str) -> random.Random:
        """A generator for one purpose, which starts anew with every call.

        Each purpose has its own, so that a larger haystack begins like a smaller one and hides the same things.
        """
        return random.Random(f"{self.seed}/{self.recipe}/{self.tokens}/{self.number}/{purpose}")


@dataclass(frozen=True)
class Prompt:
    """A sample without a name."""

    context: str
    questions: tuple[Question, ...]


class Recipe(Protocol):
    """One of the 13 tasks. The same draw and size make the same prompt."""

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """The prompt whose haystack has `size` units (words, lines, documents) beside what every prompt must hold.

        Raises:
            EvaluationError: the haystack cannot be made so large.
        """
