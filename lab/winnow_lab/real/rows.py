"""What is run, the rows of the tables in their order, and what cells scored."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from winnow.report.journal import parse_object, whole_lines
from winnow_lab.evaluate.cell import AGNOSTIC, QUERIES, Cell
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result import CellResult
from winnow_lab.report import standard_error
from winnow_lab.tasks import load_task

TASK_NAMES = ("ruler", "needle", "kv-retrieval", "documents", "gsm8k", "perplexity")
KNOWN_TASKS = (*TASK_NAMES, "demo")
"""`demo` is for the demo model, which answers nothing else."""
WINDOW, GIVEN = 2048, 1024
"""Tokens of a window of text for perplexity, and of its context."""
LABELS = {"aware": "seen", "agnostic": "later"}
"""What query modes are called here: whether the policy has seen the question."""
_QUESTIONS = 20
_DOCUMENT_TOKENS = 4096


@dataclass(frozen=True)
class Work:
    """One row of the tables: prompts of a task that are scored together."""

    name: str
    task: str
    categories: tuple[str, ...]
    tokens: int
    samples: int
    questions: int = 1
    chat: str = "on"
    """Whether prompts go through the model's chat template, as in `EvaluationPlan`."""

    @property
    def queries(self) -> tuple[str, ...]:
        """Many questions on one context are for contexts that are compressed before them."""
        return QUERIES if self.questions == 1 else (AGNOSTIC,)


def works(
    names: Sequence[str], lengths: Sequence[int], samples: int, categories: Sequence[str] | None = None
) -> Iterator[Work]:
    """The rows, in the order in which they are run. `categories` are RULER's; None: all that need no second file."""
    ruler = categories or [name for name in load_task("ruler").categories if name != "qa_2"]
    depths = load_task("needle-chat").categories
    for tokens in lengths if "demo" in names else ():
        for category in load_task("demo").categories:
            yield Work(f"{category} {tokens}", "demo", (category,), tokens, samples, chat="auto")
    for tokens in lengths if "ruler" in names else ():
        for category in ruler:
            yield Work(f"ruler {category} {tokens}", "ruler", (category,), tokens, samples)
    for tokens in lengths:
        if "needle" in names:
            each = math.ceil(samples / len(depths))
            yield Work(f"needle {tokens}", "needle-chat", depths, tokens, each)
        if "kv-retrieval" in names:
            yield Work(f"kv-retrieval {tokens}", "kv-retrieval", ("grown",), tokens, samples)
    if "documents" in names:
        contexts = max(2, math.ceil(samples / 5))  # of many questions each
        yield Work(
            f"documents {_DOCUMENT_TOKENS}", "documents", ("facts",), _DOCUMENT_TOKENS, contexts, _QUESTIONS
        )
    if "gsm8k" in names:
        yield Work("gsm8k flexible", "gsm8k-flexible", ("gsm8k",), max(lengths), samples)


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
        error=standard_error(means),
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
