"""What the studies of answers share: their flags, and their results as files."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.cli.screen.progress import add_progress_flag
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.prompts import add_prompt_flags
from winnow_lab.evaluate.result import Evaluation
from winnow_lab.papers.harness import write_page
from winnow_lab.report.tables import TextTable
from winnow_lab.study.page import results_json

TASK = "demo"
CONTROLS = ("recent", "random")
QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("agnostic", "aware")}


def add_evaluation_flags(parser: argparse.ArgumentParser, presets: tuple[str, ...], samples: int) -> None:
    """Presets, query modes, prompts, and how progress is shown; the arguments are defaults."""
    parser.add_argument(
        "--presets",
        metavar="A,B,...",
        type=typed.names,
        default=presets,
        help=f"Winnow's (default: {','.join(presets)})",
    )
    parser.add_argument("--query", choices=QUERIES, default="both", help="(default: both)")
    add_prompt_flags(parser, samples=samples)
    add_progress_flag(parser)


def write_evaluation(
    directory: Path,
    title: str,
    head: Mapping[str, Any],
    evaluation: Evaluation,
    notes: str,
    tables: Sequence[TextTable],
    *,
    name: str,
    numbers: Mapping[str, Any],
    figures: Sequence[Path] = (),
) -> None:
    """Write NAME.json and NAME.md to `directory`, and say so.

    Args:
        head: of `winnow_lab.cli.eval.output.run_head`.
        notes: how tables are to be read.
        numbers: lists that NAME.json holds besides the cells.
    """
    path = directory / f"{name}.json"
    reported = {**head, **evaluation.to_json(), **numbers}
    path.write_text(results_json(reported, ("cells", *numbers)), encoding="utf-8")
    print(f"winnow: wrote {path}", file=sys.stderr)
    lengths = " and ".join(f"{length:,}" for length in evaluation.lengths)
    task, prompts = f"tasks of `winnow eval {evaluation.task}`", f"{evaluation.prompts} prompts per cell"
    fact = f"{head['model']}, {task}, {lengths} tokens, {prompts}."
    write_page(directory / f"{name}.md", title, [head], [fact], notes, tables, figures)
