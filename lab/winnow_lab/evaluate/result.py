"""Results of an evaluation, cell by cell."""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import Cell
from winnow_lab.evaluate.outcome import Outcome
from winnow_lab.evaluate.uninformative import uninformative_categories


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
        """Return the mean score of a category, of one length or of all; None where there is nothing."""
        return _mean(
            outcome.score
            for outcome in self.outcomes
            if outcome.category == category and length in (None, outcome.length)
        )

    @property
    def scores(self) -> dict[str, list[float]]:
        """Every score, by category."""
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.category, []).append(outcome.score)
        return found

    @property
    def achieved_compression(self) -> float | None:
        """Mean compression achieved, over the answers that lived to see their context cut."""
        return _mean(
            outcome.achieved_compression
            for outcome in self.outcomes
            if outcome.achieved_compression is not None
        )

    @property
    def kv_bytes(self) -> float | None:
        """Mean bytes held when an answer ended."""
        return _mean(outcome.kv_bytes for outcome in self.outcomes)


@dataclass(frozen=True)
class Headline:
    """The mean of category means over the categories that are informative; None where none is."""

    mean: float | None
    covered: int
    of: int


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
        """The reference, unless it was refused."""
        return next((each for each in self.results if each.cell.is_full and each.outcomes), None)

    @property
    def queries(self) -> tuple[str, ...]:
        """The query modes of the cells."""
        return tuple(dict.fromkeys(each.cell.query for each in self.results if each.cell.query is not None))

    def compared(self, query: str, amount: Amount) -> list[CellResult]:
        """Return the cells of a query mode and amount."""
        wanted = (query, amount)
        return [each for each in self.results if (each.cell.query, each.cell.amount) == wanted]

    def marks(self, query: str | None, amount: Amount) -> dict[str, str]:
        """Return uninformative categories in a query mode at an amount, and why."""
        controls = [
            each
            for each in self.results
            if each.cell.preset in self.controls and (each.cell.query, each.cell.amount) == (query, amount)
        ]
        if self.full is None:
            return {}
        return uninformative_categories(
            self.categories, self.full.score, {each.cell.preset: each.score for each in controls}
        )

    def headline(self, result: CellResult, query: str | None, amount: Amount) -> Headline:
        """Return the mean of `result` over the informative categories in a query mode at an amount."""
        marked = self.marks(query, amount)
        scores = [result.score(name) for name in self.categories if name not in marked]
        return Headline(_mean(each for each in scores if each is not None), len(scores), len(self.categories))

    def plain_mean(self, result: CellResult) -> float | None:
        """Return the mean of `result` over all categories: what papers report of LongBench and RULER."""
        scores = (result.score(name) for name in self.categories)
        return _mean(score for score in scores if score is not None)

    def to_json(self) -> dict[str, Any]:
        """Return every number, and what follows from them."""
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


def _mean(values: Any) -> float | None:
    known = list(values)
    return fmean(known) if known else None
