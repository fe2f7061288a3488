"""Results of an evaluation: one question of one sample in one cell, and all of them, cell by cell.

A question at the end of a prompt that the policy judges as a whole has looked its answer up before anything is evicted,
and what it found lies in the most recent KVs: a plain window then answers it as well as the full cache. And where the
full cache itself does not answer, no policy can lose anything. Such categories are uninformative.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any, Self

from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import Cell

JOURNAL = "outcomes.jsonl"
"""File of finished answers."""
NEAR = 0.05
"""A control within this share of the full cache's score answers as well."""
MIN_FULL_SCORE = 0.1
"""Below this score the full cache does not answer."""
ScoreOf = Callable[[str], float | None]


@dataclass(frozen=True)
class Outcome:
    """One answer and its score.

    Attributes:
        cell: `Cell.name`.
        sample: `Sample.name`.
        question: its place among the sample's questions.
        length: tokens asked for; None where the task's length is not free.
        score: 0..1.
        achieved_compression: tokens of what the policy judged per KV kept of them; None if the answer ended before
            they were cut.
        kv_bytes: of the blocks that the sequence held when its answer ended.
    """

    cell: str
    sample: str
    question: int
    category: str
    length: int | None
    score: float
    answer: str
    prompt_tokens: int
    answer_tokens: int
    achieved_compression: float | None
    kv_bytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.cell, self.sample, self.question

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; journals that are older call the achieved compression `reached`."""
        return cls(**{"achieved_compression" if name == "reached" else name: v for name, v in values.items()})


@dataclass(frozen=True)
class Refusal:
    """Refusal of a cell by the engine, its reason, and for how many prompts; the others are not run either."""

    reason: str
    prompts: int


@dataclass(frozen=True)
class CellResult:
    """A cell's outcomes, in the order of the samples; none where it was refused."""

    cell: Cell
    outcomes: tuple[Outcome, ...]
    refusal: Refusal | None = None

    def score(self, category: str, length: int | None = None) -> float | None:
        """Mean score of a category, of one length or of all; None where there is nothing."""
        own = (each for each in self.outcomes if each.category == category)
        return _mean(each.score for each in own if length in (None, each.length))

    def error(self, categories: Sequence[str], length: int | None = None) -> float | None:
        """Standard error of the mean of these categories' means; None where one has a single answer, or none any."""
        own = [
            [e.score for e in self.outcomes if e.category == c and length in (None, e.length)]
            for c in categories
        ]
        own = [scores for scores in own if scores]
        if not own or min(map(len, own)) < 2:
            return None
        return math.sqrt(sum(variance(scores) / len(scores) for scores in own)) / len(own)

    @property
    def scores(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.category, []).append(outcome.score)
        return found

    @property
    def achieved_compression(self) -> float | None:
        """Mean compression achieved, over the answers that lived to see their context cut."""
        return _mean(each.achieved_compression for each in self.outcomes)

    @property
    def kv_bytes(self) -> float | None:
        """Mean bytes held when an answer ended."""
        return _mean(outcome.kv_bytes for outcome in self.outcomes)


@dataclass(frozen=True)
class Headline:
    """The mean of category means over the categories that are informative, and its standard error; None: none is."""

    mean: float | None
    covered: int
    of: int
    error: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        categories: those with samples, in the task's order.
        lengths: tokens asked for, where the task's length is free.
        prompts: questions asked in each cell.
        controls: presets that say which categories are uninformative.
        results: in the order of the plan's cells.
    """

    task: str
    categories: tuple[str, ...]
    lengths: tuple[int, ...]
    prompts: int
    controls: tuple[str, ...]
    results: tuple[CellResult, ...]

    @property
    def full(self) -> CellResult | None:
        return next((each for each in self.results if each.cell.is_full and each.outcomes), None)

    @property
    def queries(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.cell.query for each in self.results if each.cell.query is not None))

    def compared(self, query: str | None, amount: Amount) -> list[CellResult]:
        wanted = (query, amount)
        return [each for each in self.results if (each.cell.query, each.cell.amount) == wanted]

    def marks(self, query: str | None, amount: Amount) -> dict[str, str]:
        """Uninformative categories in a query mode at an amount, and why."""
        if self.full is None:
            return {}
        compared = (each for each in self.compared(query, amount) if each.cell.preset in self.controls)
        controls = {each.cell.preset: each.score for each in compared}
        return uninformative_categories(self.categories, self.full.score, controls)

    def headline(self, result: CellResult, query: str | None, amount: Amount) -> Headline:
        marked = self.marks(query, amount)
        counted = [name for name in self.categories if name not in marked]
        mean, error = _mean(map(result.score, counted)), result.error(counted)
        return Headline(mean, len(counted), len(self.categories), error)

    def prompts_to_tell(self, one: CellResult, other: CellResult) -> int | None:
        """Return how many prompts would show the difference of two cells' means, of the same prompts, as two standard
        errors of it; None: there is no difference, or one prompt alone."""
        second = {each.key[1:]: each.score for each in other.outcomes}
        gaps = [each.score - second[each.key[1:]] for each in one.outcomes if each.key[1:] in second]
        if len(gaps) < 2 or not (gap := fmean(gaps)):
            return None
        return max(2, math.ceil(4 * variance(gaps) / gap**2))

    def plain_mean(self, result: CellResult) -> float | None:
        """The mean of `result` over all categories: what papers report of LongBench and RULER."""
        return _mean(map(result.score, self.categories))

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "categories": list(self.categories),
            "lengths": list(self.lengths),
            "prompts_per_cell": self.prompts,
            "controls": list(self.controls),
            "cells": [self._cell_json(each) for each in self.results],
        }

    def _cell_json(self, result: CellResult) -> dict[str, Any]:
        cell = result.cell
        row: dict[str, Any] = {"query": cell.query, "preset": cell.preset, **vars(cell.amount)}
        if result.refusal is not None:
            return row | {"refused": result.refusal.reason, "refused_prompts": result.refusal.prompts}
        headline = self.headline(result, cell.query, cell.amount)
        return row | {
            "reached": result.achieved_compression,
            "kv_bytes": result.kv_bytes,
            "mean": headline.mean,
            "standard_error": headline.error,
            "mean_covers": headline.covered,
            "plain_mean": self.plain_mean(result),
            "not_discriminating": self.marks(cell.query, cell.amount),
            "by_category": {name: result.score(name) for name in self.categories},
            "by_length": {
                str(length): {name: result.score(name, length) for name in self.categories}
                for length in self.lengths
            },
            "scores": result.scores,
        }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def uninformative_categories(
    categories: Sequence[str], full: ScoreOf, controls: Mapping[str, ScoreOf]
) -> dict[str, str]:
    """Uninformative categories, each with why; `full` and `controls`, by preset, give a category's score."""
    marks = {}
    for category in categories:
        reference = full(category)
        if reference is None:
            continue
        if reference < MIN_FULL_SCORE:
            marks[category] = f"the full cache itself scores {reference:.2f}"
            continue
        for name, score in controls.items():
            control = score(category)
            if control is not None and control >= (1 - NEAR) * reference:
                marks[category] = f"{name} scores {control:.2f}, the full cache {reference:.2f}"
                break
    return marks
