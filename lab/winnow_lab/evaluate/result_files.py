"""An evaluation as files: every number as JSON, tables as Markdown, pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.report.provenance import origin
from winnow.values.json_values import dump_json
from winnow_lab.evaluate.charts import draw
from winnow_lab.evaluate.result import Evaluation
from winnow_lab.evaluate.result_tables import all_tables
from winnow_lab.report.plots import can_draw

RESULTS = "results.json"
TABLES = "results.md"
_QUERY_AWARE = """\
Query-aware: the policy judges the whole prompt, and so knows the question when it decides what stays. Query-agnostic:
it judges the context before it has seen the question, which is then kept whole."""
_MEAN = """\
A mean is over the informative categories. One that a control answers as well as the full cache does (within 5 %), or
that the full cache itself does not answer (below 0.1), is uninformative: it is marked and left out."""


def write_report(evaluation: Evaluation, directory: Path, head: Mapping[str, Any]) -> list[Path]:
    """Write results.json, results.md and, where matplotlib is installed, the pictures; returns their paths.

    Args:
        head: what both files begin with: `command`, `date`, `commit`, `machine` and the settings.
    """
    results, tables = directory / RESULTS, directory / TABLES
    results.write_text(dump_json({**head, **evaluation.to_json()}, indent=1) + "\n", encoding="utf-8")
    pictures = draw(evaluation, directory) if can_draw() else []
    shown = [str(path.relative_to(directory)) for path in pictures if path.suffix == ".svg"]
    tables.write_text("\n".join(_markdown(evaluation, head, shown)) + "\n", encoding="utf-8")
    return [results, tables, *pictures]


def largest_error(prompts: int) -> float:
    """Return the largest standard error that a mean of `prompts` numbers between 0 and 1 can have."""
    return 0.5 / math.sqrt(prompts)


def _markdown(evaluation: Evaluation, head: Mapping[str, Any], pictures: Sequence[str]) -> list[str]:
    lines = [
        f"# winnow eval {evaluation.task}",
        "",
        *origin(head),
        f"- model: {head['model']}",
        f"- {evaluation.prompts} prompts per cell: the standard error of a mean over all of them is at most "
        f"{largest_error(evaluation.prompts):.2f}; all cells see the same prompts, so differences are known better",
        "",
        _QUERY_AWARE,
        "",
        _MEAN,
        "",
    ]
    lines += [text for name in pictures if "/" not in name for text in (f"![{name}]({name})", "")]
    for table in all_tables(evaluation):
        lines += table.markdown()
    maps = [f"- [{Path(name).stem}]({name})" for name in pictures if "/" in name]
    return [*lines, "## Categories by length", "", *maps, ""] if maps else lines
