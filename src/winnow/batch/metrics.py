"""Scores of one prediction, each between 0.0 and 1.0, by name; winnow-lab adds those of published benchmarks."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

PairScore = Callable[[str, str], float]
"""Prediction, reference -> 0.0 to 1.0."""
Score = Callable[[str, Sequence[str], Sequence[str]], float]
"""Prediction, references (at least one), class names -> 0.0 to 1.0."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")


def exact_match(prediction: str, reference: str) -> float:
    """Return 1.0 when the texts are equal but for case and runs of white space, else 0.0."""
    return float(prediction.lower().split() == reference.lower().split())


def match_all(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains, in either case (RULER's `string_match_all`)."""
    said = prediction.lower()
    return sum(reference.lower() in said for reference in references) / len(references)


def token_f1(prediction: str, reference: str) -> float:
    """Return F1 of the words of two answers, as SQuAD counts them and LongBench's `qa_f1_score` after it.

    Words are lower-cased, without ASCII punctuation; a, an and the do not count. Multisets are compared; 0.0 where
    nothing is shared, so also for two texts without words.
    """
    predicted, expected = (_ARTICLES.sub(" ", plain_text(text)).split() for text in (prediction, reference))
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """Return F1 of the longest common subsequence of words (ROUGE-L with beta = 1).

    Words are runs of letters and digits, in lower case; no stemming, no stop words. Two texts without words score 1.0.
    """
    predicted, expected = _WORD.findall(prediction.lower()), _WORD.findall(reference.lower())
    if not predicted or not expected:
        return float(predicted == expected)
    row = [0] * (len(expected) + 1)
    for word in predicted:
        diagonal = 0
        for column, other in enumerate(expected, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return 2 * row[-1] / (len(predicted) + len(expected))


def plain_text(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def best_of(score: PairScore) -> Score:
    return lambda prediction, references, _: max(score(prediction, reference) for reference in references)


METRICS: Mapping[str, Score] = MappingProxyType(
    {
        "exact": best_of(exact_match),
        "rouge-l": best_of(rouge_l),
        "qa-f1": best_of(token_f1),
        "match-all": match_all,
    }
)


def score(metric: str, prediction: str, references: Sequence[str]) -> float:
    """Return the score of a prediction against accepted answers, at least one; the best counts, but for `match-all`.
    `metric` is one of `METRICS`."""
    assert references and not isinstance(references, str), "references are a sequence of at least one text"
    return METRICS[metric](prediction, references, ())
