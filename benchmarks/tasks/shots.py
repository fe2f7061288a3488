"""Worked examples in front of a task's questions."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from winnow.errors import EvaluationError
from winnow.evaluate.sample import Sample
from winnow.evaluate.tasks.task import TaskSettings

T = TypeVar("T")


def shots_asked(settings: TaskSettings, default: int, most: int) -> int:
    """Return how many worked examples to give; raises EvaluationError where fewer than 0 or more than there are."""
    shots = default if settings.shots is None else settings.shots
    if not 0 <= shots <= most:
        raise EvaluationError(
            f"--shots must lie between 0 and {most}, the examples that there are, got {shots}"
        )
    return shots


def grouped(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in groups of equal size; the last one may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def require_room(sample: Sample, settings: TaskSettings) -> Sample:
    """Return the sample; raises EvaluationError where a prompt of it leaves the model no room for the whole answer."""
    for question in sample.questions:
        tokens = settings.count_tokens(sample.context + question.plain)
        if tokens + question.max_tokens > settings.max_model_len:
            raise EvaluationError(
                f"sample {sample.name} has {tokens} tokens and answers with up to {question.max_tokens}, but the model "
                f"takes {settings.max_model_len} together: fewer --shots make it shorter"
            )
    return sample
