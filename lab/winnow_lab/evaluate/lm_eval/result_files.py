"""Results of lm_eval in each cell, as a table."""

from collections.abc import Sequence

from winnow_lab.evaluate.lm_eval.lm_eval_cell import LmEvalResult
from winnow_lab.report.tables import Footnotes, TextTable

NOTE = """\
Prompts, answers and metrics are those of lm-evaluation-harness; what stands behind the sign is its standard error. A
continuation is scored by forced decoding after its context was computed and cut: policies judge the context, question
and few-shot examples in it, and never the continuation."""


def lm_eval_table(results: Sequence[LmEvalResult]) -> TextTable:
    """Return tasks and metrics down, cells across."""
    found = [result.metrics() for result in results]
    names = dict.fromkeys(key for metrics in found for key in metrics)
    rows = tuple(
        (f"{task} {metric}", tuple(_entry(metrics.get((task, metric))) for metrics in found))
        for task, metric in names
    )
    notes = Footnotes()
    columns = tuple(
        result.cell if result.refusal is None else f"{result.cell} {notes.mark(result.refusal)}"
        for result in results
    )
    return TextTable("lm_eval", "task and metric", columns, rows, notes.lines())


def _entry(found: tuple[float, float | None] | None) -> str:
    if found is None:
        return ""
    value, error = found
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
