"""Variables to be tracked through a text (vt), and words to be counted in one (cwe, fwe)."""

import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks.haystack import insert
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import distinct, shuffled
from winnow_lab.evaluate.tasks.ruler.documents import Draw, Prompt
from winnow_lab.evaluate.tasks.ruler.needles import NOISE
from winnow_lab.evaluate.tasks.task import largest_fitting

# Names of the worked example are shorter than those asked for, so that it never holds one of them.
_EXAMPLE_LETTERS, _LETTERS = 3, 5


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
        def worked(size: int) -> str:
            text, asked = self._tracked(draw.rng("example"), _EXAMPLE_LETTERS, size)
            return f"{text}{asked.plain} {' '.join(asked.references)}"

        fits = largest_fitting(lambda size: draw.count_tokens(worked(size)), self.example_tokens)
        text, question = self._tracked(draw.rng("asked"), _LETTERS, size)
        return Prompt(f"{worked(fits or 0)}\n\n{text}", (question,))

    def _tracked(self, rng: random.Random, letters: int, size: int) -> tuple[str, Question]:
        """A text with one chain, all of whose variables get one value, and the question for them."""
        names = distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
        chain = tuple(islice(names, self.hops + 1))
        value = str(rng.randrange(10_000, 100_000))
        # The space at the end is RULER's.
        sources = (value, *(f"VAR {name} " for name in chain))
        assignments = [f"VAR {name} = {source}" for name, source in zip(chain, sources, strict=False)]
        around = [NOISE] * (len(assignments) + size)
        places = sorted(rng.sample(range(len(around)), len(assignments)))
        text = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            + "\n".join(insert(assignments, around, places))
        )
        question = Question(
            text=f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            prefix=" Answer: According to the chain(s) of variable assignment in the text above,"
            f" {len(chain)} variables are assigned the value {value}, they are: ",
            references=chain,
            metric="match-all",
            max_tokens=self.answer_tokens,
        )
        return text, question


# Below this length RULER repeats words less often, for the lists would not fit.
_SHORT = 4096
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"


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
        example, asked = ((3, 1, 10), (6, 1, size))
        if draw.tokens >= _SHORT:
            example, asked = (10, 3, 30), (self.common, self.rare, size)
        words = _drawn_words(draw)
        answer, text = self._list(words, *example, draw.rng("example"))
        worked = f"{text}{_COMMON_QUESTION}{_COMMON_PREFIX} {_numbered(answer)}\n"
        answer, text = self._list(words, *asked, draw.rng("order"))
        question = Question(
            _COMMON_QUESTION, tuple(answer), "match-all", self.answer_tokens, prefix=_COMMON_PREFIX
        )
        return Prompt(worked + text, (question,))

    def _list(
        self, words: Iterator[str], common: int, rare: int, others: int, rng: random.Random
    ) -> tuple[list[str], str]:
        """The common words, and a list in which each stands `common` times, and `others` other ones `rare` times."""
        answer = list(islice(words, self.top))
        items = answer * common + list(islice(words, others)) * rare
        rng.shuffle(items)
        text = (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{_numbered(items)}"
        )
        return answer, text


def _drawn_words(draw: Draw) -> Iterator[str]:
    words = draw.materials.words
    yield from (words[place] for place in shuffled(draw.rng("words"), len(words)))
    raise EvaluationError(
        f"--tokens {draw.tokens}: {draw.recipe} needs more than its {len(words):,} words; ask for fewer tokens"
    )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


# The word of the first rank stands for noise.
_DOTS = "..."
# From this number on, the counts of the ranks asked for differ from each other and the next, although rounded down.
_FEWEST = 53


@dataclass(frozen=True)
class FrequentWords:
    """Made-up words whose counts follow Zipf's law with exponent 2, shuffled. A unit of the haystack is one more in the
    number `n` that the counts are shares of: the word of rank k stands there `n * k**-2 / zeta(2)` times, rounded down.

    Attributes:
        tokens_per_word: length of the whole in tokens for each word of the vocabulary.
        top: ranks asked for, after the first.
    """

    tokens_per_word: int = 50
    letters: int = 6
    top: int = 3
    answer_tokens: int = 50

    def prompt(self, draw: Draw, size: int) -> Prompt:
        rng = draw.rng("words")
        words = distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=self.letters)))
        vocabulary = max(draw.tokens // self.tokens_per_word, self.top + 1)
        ranked = [_DOTS, *islice(words, vocabulary - 1)]
        counts = (count_of_rank(rank, _FEWEST + size) for rank in range(1, len(ranked) + 1))
        items = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
        draw.rng("order").shuffle(items)
        context = (
            "Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {' '.join(items)}"
        )
        question = Question(
            text="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            references=tuple(ranked[1 : 1 + self.top]),
            metric="match-all",
            max_tokens=self.answer_tokens,
        )
        return Prompt(context, (question,))


def count_of_rank(rank: int, n: int) -> int:
    """How often the word of a rank, from 1, stands in the text: `n * rank**-2 / zeta(2)`, rounded down."""
    return int(n / rank**2 / (math.pi**2 / 6))
