"""Answers that name one of several things: a class, a paragraph, a number. All after LongBench."""

import re
from collections.abc import Sequence

_DIGITS = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def classification(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Return 1 / the number of classes that the prediction names, where the right one is among them, else 0.0.

    A class is named when it occurs in the prediction. Named classes that are a part of the right one's name do not
    count, except one that stands directly behind another such class: the original removes while it iterates and so
    passes over it, and published numbers contain that. The best over the references counts.
    """
    return max(_named_among(prediction, reference, classes) for reference in references)


def _named_among(prediction: str, reference: str, classes: Sequence[str]) -> float:
    named = [name for name in classes if name in prediction]
    kept: list[str] = []
    passed_over = False
    for name in named:
        removed = name in reference and name != reference and not passed_over
        if not removed:
            kept.append(name)
        passed_over = removed
    return 1 / len(kept) if reference in kept else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that are the number of the reference, "Paragraph N".

    0.0 without numbers.

    Raises:
        ValueError: the reference names no paragraph.
    """
    paragraph = _PARAGRAPH.search(reference)
    if paragraph is None:
        raise ValueError(
            f"a reference of this metric names a paragraph, such as 'Paragraph 7', not {reference!r}"
        )
    return count(prediction, paragraph[1])


def count(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that are the reference; 0.0 without numbers."""
    numbers = _DIGITS.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0
