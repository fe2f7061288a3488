"""Overlap of words or characters between a prediction and a reference."""

import re
from collections import Counter
from difflib import SequenceMatcher

from winnow.metrics.answers import words_of_answer

_NO_CODE = ("`", "#", "//")
_WORD = re.compile(r"[^\W_]+")


def token_f1(prediction: str, reference: str) -> float:
    """Return F1 of the words of two answers, as SQuAD counts them and LongBench's `qa_f1_score` after it.

    Words are lower-cased, without ASCII punctuation; a, an and the do not count. What both share is the intersection of
    multisets; the order is not looked at. 0.0 where nothing is shared, so also for two texts without words.
    """
    predicted, expected = words_of_answer(prediction), words_of_answer(reference)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected)) if shared else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """Return F1 of the longest common subsequence of words (ROUGE-L with beta = 1).

    Words are runs of letters and digits, in lower case; no stemming, no stop words. With `common` the length of the
    longest subsequence of words that both texts share in order, precision is `common / words of the prediction`,
    recall is `common / words of the reference`, and the score their harmonic mean. Two texts without words score 1.0.
    """
    predicted, expected = _WORD.findall(prediction.lower()), _WORD.findall(reference.lower())
    if not predicted or not expected:
        return float(predicted == expected)
    common = _common_subsequence(predicted, expected)
    return 2 * common / (len(predicted) + len(expected))


def edit_similarity(prediction: str, reference: str) -> float:
    """Return how alike a line of code and the reference are, in hundredths (LongBench's `code_sim_score`).

    The prediction's first line, after newlines in front, that has no backtick, `#` or `//` is taken; an empty text if
    there is none. LongBench measures with `fuzzywuzzy.fuzz.ratio`, which has two definitions. Alone, that package takes
    difflib's ratio `2 M / T` of matching blocks; beside python-Levenshtein it takes the ratio of insertions and
    deletions, which is often higher. This is difflib's: the requirements of KV-Compress's experiments, and of LongBench
    in lm-evaluation-harness, name fuzzywuzzy alone. The prediction goes first, since difflib's ratio is not symmetric.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def _common_subsequence(left: list[str], right: list[str]) -> int:
    """Return the length of the longest common subsequence; time `len(left) * len(right)`, one row of memory."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]
