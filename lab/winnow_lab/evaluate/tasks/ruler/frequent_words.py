"""The most frequent words of a coded text (fwe)."""

import math
import string
from dataclasses import dataclass
from itertools import islice

from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import distinct
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt

# The word of the first rank stands for noise.
_DOTS = "..."
# From this number on, the counts of the ranks asked for differ from each other and the next, although rounded down.
_FEWEST = 53
_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True)
class FrequentWords:
    """Made-up words whose counts follow Zipf's law with exponent 2, shuffled. A unit of the haystack is one more in the
    number `n` that the counts are shares of: the word of rank k stands there `n * k**-2 / zeta(2)` times, rounded down.

    Attributes:
        tokens_per_word: length of the whole in tokens for each word of the vocabulary.
        letters: of a word.
        top: ranks asked for, after the first.
    """

    tokens_per_word: int = 50
    letters: int = 6
    top: int = 3
    answer_tokens: int = 50

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        rng = draw.rng("words")
        words = distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=self.letters)))
        vocabulary = max(draw.tokens // self.tokens_per_word, self.top + 1)
        ranked = [_DOTS, *islice(words, vocabulary - 1)]
        items = [
            word for rank, word in enumerate(ranked, 1) for _ in range(count_of_rank(rank, _FEWEST + size))
        ]
        draw.rng("order").shuffle(items)
        context = (
            "Read the following coded text and track the frequency of each coded word. "
            f"Find the three most frequently appeared coded words. {' '.join(items)}"
        )
        question = Question(
            text=_QUESTION,
            prefix=_PREFIX,
            references=tuple(ranked[1 : 1 + self.top]),
            metric="match-all",
            max_tokens=self.answer_tokens,
        )
        return Prompt(context, (question,))


def count_of_rank(rank: int, n: int) -> int:
    """Return how often the word of a rank, from 1, stands in the text: `n * rank**-2 / zeta(2)`, rounded down."""
    return int(n / rank**2 / (math.pi**2 / 6))
