"""How many answers are right, and when enough have been wrong."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.batch_max.methods import Method
from benchmarks.papers.batch_max.prompts import Ask
from winnow.evaluate.metrics import score
from winnow.llm import LLM

WAVE = 12
"""Prompts that are asked together before the scores are looked at."""


@dataclass(frozen=True)
class Accuracy:
    """Scores of the first prompts of a task, all of them unless a bar could no longer be reached."""

    scores: tuple[float, ...]
    asked: int
    """Prompts of the task."""

    @property
    def complete(self) -> bool:
        return len(self.scores) == self.asked

    @property
    def mean(self) -> float:
        """Of the scores that are there."""
        return statistics.fmean(self.scores)

    @property
    def best_possible(self) -> float:
        """The mean if every prompt that was not asked were answered right."""
        return (sum(self.scores) + self.asked - len(self.scores)) / self.asked

    def error_beside(self, other: "Accuracy") -> float:
        """Standard error of the difference of two means over the same prompts."""
        differences = [mine - theirs for mine, theirs in zip(self.scores, other.scores, strict=False)]
        if len(differences) < 2:
            return math.nan
        return statistics.stdev(differences) / math.sqrt(len(differences))

    def to_json(self) -> dict[str, Any]:
        """Scores, and what follows from them."""
        return {
            "mean": self.mean,
            "complete": self.complete,
            "scores": list(self.scores),
        }


def measure_accuracy(
    llm: LLM,
    asks: Sequence[Ask],
    method: Method,
    bar: float = 0.0,
    on_wave: Callable[[int], None] = lambda done: None,
) -> Accuracy:
    """Ask all prompts; answers end as answers do.

    What a method keeps of a prompt does not depend on what else runs, so prompts need not be batched as when timed.

    Args:
        bar: stop once the mean can no longer reach it, however the other prompts are answered.
        on_wave: is told how many prompts are done.
    """
    scores: list[float] = []
    accuracy = Accuracy((), len(asks))
    while not accuracy.complete and accuracy.best_possible >= bar:
        wave = asks[len(scores) : len(scores) + WAVE]
        params = [method.params(ask.question.max_tokens, to_the_end=False) for ask in wave]
        outputs = llm.generate([list(ask.token_ids) for ask in wave], params)
        for ask, output in zip(wave, outputs, strict=True):
            output.raise_for_error()
            question = ask.question
            scores.append(score(question.metric, output.outputs[0].text, question.references))
        accuracy = Accuracy(tuple(scores), len(asks))
        on_wave(len(scores))
    return accuracy
