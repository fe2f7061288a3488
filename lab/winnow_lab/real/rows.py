"""What cells scored."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from winnow.report.journal import parse_object, whole_lines
from winnow_lab.evaluate.cell import Cell
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result import CellResult
from winnow_lab.real.work import Work

MIN_SCORE = 0.5
"""What the full cache must score for a category to count."""


@dataclass(frozen=True)
class Row:
    """What a cell scored in a work; the standard error is over contexts."""

    work: str
    cell: str
    method: str
    query: str | None
    compression: float | None
    score: float | None
    error: float | None
    contexts: int
    answers: int
    reached: float | None
    kv_bytes: float | None
    refused: str | None = None
    seconds: float | None = None
    """Of one context with all its questions, alone, where that was measured."""


def counts(reference: Row, least: float = MIN_SCORE) -> bool:
    """Whether a category counts, by the row of the full cache: a policy cannot lose what the model does not know."""
    return reference.score is not None and reference.score >= least


def row_of(work: Work, result: CellResult, seconds: float | None = None) -> Row:
    """The row of a cell."""
    by_context: dict[str, list[float]] = {}
    for outcome in result.outcomes:
        by_context.setdefault(outcome.sample, []).append(outcome.score)
    means = [fmean(scores) for scores in by_context.values()]
    cell = result.cell
    return Row(
        work=work.name,
        cell=cell.name,
        method=cell.preset,
        query=cell.query,
        compression=cell.amount.compression,
        score=fmean(means) if means else None,
        error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        contexts=len(means),
        answers=len(result.outcomes),
        reached=result.achieved_compression,
        kv_bytes=result.kv_bytes,
        refused=None if result.refusal is None else result.refusal.reason,
        seconds=seconds,
    )


def complete_cells(journal: Path, plan: EvaluationPlan) -> list[Cell]:
    """The plan's cells that a journal holds every answer of."""
    if not journal.exists():
        return []
    with journal.open("rb") as file:
        found = [parse_object(line) or {} for line in whole_lines(file)]
    answers = Counter(each.get("cell") for each in found)
    wanted = sum(len(sample.questions) for sample in plan.make_samples())
    return [cell for cell in plan.cells if answers[cell.name] == wanted]
