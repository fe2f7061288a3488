"""The most common words of a list (cwe)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt

# Below this length RULER repeats words less often, for the lists would not fit.
_SHORT = 4096
_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


@dataclass(frozen=True)
class _Counts:
    """Numbers of times that common words stand in the list, and all others; and the number of these `others`."""

    common: int
    rare: int
    others: int


@dataclass(frozen=True)
class CommonWords:
    """A numbered, shuffled list in which ten words are common, behind a worked example of the same kind; a unit of the
    haystack is one more word that is not common.

    Attributes:
        common: how often a common word stands in the list, and `rare` how often any other.
    """

    common: int = 30
    rare: int = 3
    top: int = 10
    answer_tokens: int = 120

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        example, asked = (
            (_Counts(3, 1, 10), _Counts(6, 1, size))
            if draw.tokens < _SHORT
            else (_Counts(10, 3, 30), _Counts(self.common, self.rare, size))
        )
        words = _drawn_words(draw)
        answer, text = self._list(words, example, draw.rng("example"))
        worked = f"{text}{_QUESTION}{_PREFIX} {_numbered(answer)}\n"
        answer, text = self._list(words, asked, draw.rng("order"))
        question = Question(
            text=_QUESTION,
            prefix=_PREFIX,
            references=tuple(answer),
            metric="match-all",
            max_tokens=self.answer_tokens,
        )
        return Prompt(worked + text, (question,))

    def _list(self, words: Iterator[str], counts: _Counts, rng: random.Random) -> tuple[list[str], str]:
        common = list(islice(words, self.top))
        items = common * counts.common + list(islice(words, counts.others)) * counts.rare
        rng.shuffle(items)
        text = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{_numbered(items)}"
        )
        return common, text


def _drawn_words(draw: Draw) -> Iterator[str]:
    """Yield different words in random order; raises EvaluationError when there are no more."""
    words = draw.materials.words
    for place in shuffled(draw.rng("words"), len(words)):
        yield words[place]
    raise EvaluationError(
        f"--tokens {draw.tokens}: {draw.recipe} needs more than its {len(words):,} words; ask for fewer tokens"
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
