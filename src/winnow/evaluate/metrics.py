"""Scores of one prediction against one reference, each between 0.0 and 1.0."""

import re
from collections.abc import Callable

WORD = re.compile(r"[^\W_]+")


def exact_match(prediction: str, reference: str) -> float:
    """1.0 when both texts are the same after trimming, joining runs of white space and lowering case, else 0.0."""
    return float(_normalised(prediction) == _normalised(reference))


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (ROUGE-L with beta = 1).

    Words are runs of letters and digits, in lower case; no stemming, no stop words. With `common` the length of the
    longest subsequence of words that both texts share in order, precision is `common / words of the prediction`,
    recall is `common / words of the reference`, and the score their harmonic mean. Two texts without words score 1.0.
    """
    predicted, expected = WORD.findall(prediction.lower()), WORD.findall(reference.lower())
    if not predicted or not expected:
        return float(predicted == expected)
    common = _common_subsequence(predicted, expected)
    return 2 * common / (len(predicted) + len(expected))


METRICS: dict[str, Callable[[str, str], float]] = {"exact": exact_match, "rouge-l": rouge_l}


def score(metric: str, prediction: str, reference: str) -> float:
    """The score by `metric`, a key of `METRICS`; raises ValueError for any other name."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}: expected one of {', '.join(METRICS)}")
    return METRICS[metric](prediction, reference)


def _normalised(text: str) -> str:
    return " ".join(text.split()).lower()


def _common_subsequence(left: list[str], right: list[str]) -> int:
    """Length of the longest common subsequence; time `len(left) * len(right)`, one row of memory."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]
