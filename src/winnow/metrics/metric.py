"""Interface of a metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PairScore = Callable[[str, str], float]
"""Prediction, reference -> 0.0 to 1.0."""
Score = Callable[[str, Sequence[str], Sequence[str]], float]
"""Prediction, references (at least one), class names -> 0.0 to 1.0."""


@dataclass(frozen=True)
class Metric:
    """A way to score an answer.

    Attributes:
        score: prediction, references, class names -> 0.0 to 1.0.
        require: raises EvaluationError where a package is missing that it needs; None: it needs none.
    """

    score: Score
    require: Callable[[], object] | None = None


def best_of(score: PairScore, require: Callable[[], object] | None = None) -> Metric:
    """Return the metric that compares with one reference at a time, and counts the best."""

    def best(prediction: str, references: Sequence[str], _classes: Sequence[str]) -> float:
        return max(score(prediction, reference) for reference in references)

    return Metric(best, require)


def first_line(metric: Metric) -> Metric:
    """Return `metric` of the prediction's first line, after newlines in front of it (LongBench's few-shot subsets)."""

    def cut(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
        return metric.score(prediction.lstrip("\n").split("\n")[0], references, classes)

    return Metric(cut, metric.require)
