"""The tables and the picture as files."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.papers.h2h.continuations import Continuations
from benchmarks.papers.h2h.tables import longbench_tables, perplexity_table
from winnow.bench.results_json import results_json
from winnow.evaluate.charts import draw
from winnow.evaluate.origin import origin
from winnow.evaluate.perplexity import Perplexity
from winnow.evaluate.result import Evaluation
from winnow.evaluate.tables import all_tables
from winnow.figures import can_draw
from winnow.text_table import TextTable

NAME = "h2h"
_LINES = 8
"""Presets in a panel of the picture: the best ones. More cannot be told apart."""
_SETTING = """\
Query-aware: the policy judges the whole prompt, and so knows the question when it decides what stays. Query-agnostic:
it judges the context before it has seen the question, which is then kept whole. Means are over the categories that
discriminate: one that a control (`recent`, `random`) answers within 5 % of the full cache says nothing about a policy;
it is marked and left out. Presets run without rounds under pressure."""


def tables(
    evaluation: Evaluation, found: Sequence[Perplexity], continuations: Continuations
) -> list[TextTable]:
    """Every table, those beside the papers last."""
    return [
        *all_tables(evaluation),
        *longbench_tables(evaluation),
        *([perplexity_table(found, continuations)] if found else []),
    ]


def write(
    directory: Path,
    head: Mapping[str, Any],
    evaluation: Evaluation,
    found: Sequence[Perplexity],
    continuations: Continuations,
) -> list[Path]:
    """Write h2h.json, h2h.md and, where matplotlib is installed, h2h.svg; returns their paths."""
    results, page = directory / f"{NAME}.json", directory / f"{NAME}.md"
    numbers = {**head, **evaluation.to_json(), "perplexity": [each.to_json() for each in found]}
    results.write_text(results_json(numbers, ("cells", "perplexity")), encoding="utf-8")
    pictures = _picture(directory, evaluation) if can_draw() else []
    lines = _head(head, evaluation) + [text for path in pictures for text in (f"![scores]({path.name})", "")]
    for table in tables(evaluation, found, continuations):
        lines += table.markdown()
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [results, page, *pictures]


def _head(head: Mapping[str, Any], evaluation: Evaluation) -> list[str]:
    return [
        "# Eviction policies head to head",
        "",
        *origin(head),
        f"- {head['model']}, tasks of `winnow eval {evaluation.task}`, "
        f"{' and '.join(f'{n:,}' for n in evaluation.lengths)} tokens, {evaluation.prompts} prompts per cell",
        "",
        _SETTING,
        "",
    ]


def _picture(directory: Path, evaluation: Evaluation) -> list[Path]:
    """Scores over compression of the presets that are best on average."""

    def merit(preset: str) -> float:
        means = [
            evaluation.headline(each, each.cell.query, each.cell.compression).mean or 0.0
            for each in evaluation.results
            if each.cell.preset == preset
        ]
        return sum(means) / len(means)

    presets = {
        each.cell.preset for each in evaluation.results if each.cell.compression and not each.cell.is_full
    }
    best = sorted(presets - {*evaluation.controls}, key=merit, reverse=True)[:_LINES]
    kept = {*best, *evaluation.controls}
    shown = tuple(each for each in evaluation.results if each.cell.is_full or each.cell.preset in kept)
    with tempfile.TemporaryDirectory() as drafts:
        drawn = draw(replace(evaluation, results=shown), Path(drafts))
        scores = [path for path in drawn if path.name == "score.svg"]
        target = directory / f"{NAME}.svg"
        for path in scores:
            target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return [target] if scores else []
