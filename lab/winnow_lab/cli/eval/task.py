"""One task of `winnow eval`: its flags, and from what was typed to tables and files."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winnow.cli.flags.engine import open_llm
from winnow.cli.flags.options import add_model_argument
from winnow.cli.screen.terminal import resume_hint
from winnow.extras import install_hint
from winnow_lab.cli.eval.display import show_evaluation
from winnow_lab.cli.eval.options import EvalOptions, run_head, show_tables
from winnow_lab.evaluate.outcome import JOURNAL
from winnow_lab.evaluate.tasks import Task
from winnow_lab.study import flag
from winnow_lab.study.options import add_options, options_of

if TYPE_CHECKING:
    from winnow_lab.evaluate.result import Evaluation

DESCRIPTION = """\
{summary}

Every cell of the tables is one preset at one compression or budget, judging with the question (query-aware)
or before it (query-agnostic); the full cache is always among them. All cells see the same prompts
and run through one engine together. Categories that do not tell policies apart are marked, and
means leave them out.

With -o, answers reach the disk as they finish, and the same command resumes where it was stopped.
"""
EPILOG = """\
categories:
  {categories}
"""
_QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("aware", "agnostic")}


@dataclass(frozen=True)
class Options(EvalOptions):
    """Options for the prompts and for what policies see of them."""

    query: str = flag(
        "both", "whether policies judge the question too, or the context before it", choices=_QUERIES
    )
    control: tuple[str, ...] = flag(
        ("recent", "random"),
        "presets that mark a category where they answer as the full cache does; none: no marks",
    )
    samples: int | None = flag(None, "of each category (default: the task's own)", least=1)
    tokens: tuple[int, ...] = flag((1024,), "of prompt and answer, where the task's length is free", least=1)
    seed: int = flag(0, "of the prompts", least=0)
    questions: int = flag(
        1, "of one context, where the task can; agnostic ones share its compressed KVs", least=1
    )
    shots: int | None = flag(None, "worked examples in front (default: the task's own)", least=0)
    categories: tuple[str, ...] = flag((), "only these")
    data: Path | None = flag(None, "folder of the task's files (default: the sample that ships)")
    chat: str = flag(
        "auto",
        "prompts through the model's chat template; auto: as the task says",
        choices=("auto", "on", "off"),
    )
    JOURNAL: ClassVar[str] = JOURNAL


def configure(parser: argparse.ArgumentParser, task: Task) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    summary = f"{task.summary[:1].upper()}{task.summary[1:]}."
    parser.description = DESCRIPTION.format(summary=summary)
    parser.epilog = EPILOG.format(categories=", ".join(task.categories)).replace("%", "%%")
    add_options(parser, Options)
    add_model_argument(parser)


def execute(namespace: argparse.Namespace) -> int:
    """Evaluate, show, write, and return the exit code."""
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import engine_needs, plan_cells
    from winnow_lab.evaluate.plan import EvaluationPlan
    from winnow_lab.evaluate.runner import evaluate
    from winnow_lab.evaluate.settings import settings_for

    controls = () if asked.control == ("none",) else asked.control
    presets = tuple(dict.fromkeys(asked.eviction))
    cells = plan_cells(presets, asked.amounts, _QUERIES[asked.query], controls)
    options = asked.opened(engine_needs(cells))
    with open_llm(options) as llm:
        names = ("samples", "seed", "data", "questions", "shots", "categories")
        own = {name: getattr(asked, name) for name in names} | {"tokens": tuple(sorted(set(asked.tokens)))}
        settings = settings_for(llm, **own)
        plan = EvaluationPlan(namespace.task, namespace.loaded, settings, cells, controls, asked.chat)
        head = run_head(llm, options) | {
            "query": asked.query,
            "chat": plan.chat,
            "settings": plan.settings_json(),
        }
        try:
            with show_evaluation(asked.progress) as show:
                evaluation = evaluate(
                    llm, plan, journal=asked.journal, overwrite=asked.overwrite, on_step=show
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (asked.output is not None)) from None
    _show(evaluation, head)
    if asked.output is not None:
        _write(asked.output, evaluation, head)
    return 0


def _show(evaluation: "Evaluation", head: dict[str, Any]) -> None:
    from winnow_lab.evaluate.result_tables import all_tables

    show_tables(head, f"{evaluation.prompts} prompts per cell", all_tables(evaluation))


def _write(directory: Path, evaluation: "Evaluation", head: dict[str, Any]) -> None:
    from winnow_lab.evaluate.result_files import RESULTS, TABLES, write_report
    from winnow_lab.report.plots import can_draw

    pictures = len(write_report(evaluation, directory, head)) - 2
    print(f"winnow: wrote {RESULTS}, {TABLES} and {pictures} pictures in {directory}", file=sys.stderr)
    if not can_draw():
        print(
            f"winnow: no plots: drawing needs matplotlib: {install_hint('plots', './lab')}", file=sys.stderr
        )
