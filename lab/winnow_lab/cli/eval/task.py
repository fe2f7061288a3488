"""One task of `winnow eval`: its flags, and from what was typed to tables and files."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import add_engine_flags, evaluation_options, open_llm
from winnow.cli.flags.options import add_model_argument
from winnow.cli.screen.terminal import resume_hint
from winnow.extras import install_hint
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.cells import (
    KV_FLOOR,
    OF_CELLS,
    add_cell_flags,
    add_data_flag,
    cell_amounts,
    check_data,
)
from winnow_lab.cli.eval.display import show_evaluation
from winnow_lab.cli.eval.output import add_output_flags, check_output, run_head, show_tables
from winnow_lab.cli.eval.prompts import add_prompt_flags, prompt_settings
from winnow_lab.evaluate.tasks import Task

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.evaluate.plan import EvaluationPlan
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


def configure(parser: argparse.ArgumentParser, task: Task) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [MODEL] [options]"
    summary = f"{task.summary[:1].upper()}{task.summary[1:]}."
    parser.description = DESCRIPTION.format(summary=summary)
    parser.epilog = EPILOG.format(categories=", ".join(task.categories)).replace("%", "%%")
    cells = add_cell_flags(parser)
    cells.add_argument(
        "--query",
        choices=_QUERIES,
        default="both",
        help="whether policies judge the question too, or the context before it (default: both)",
    )
    cells.add_argument(
        "--control",
        dest="controls",
        metavar="A,...",
        type=typed.names,
        default=("recent", "random"),
        help="presets that mark a category where they answer as well as the full cache; none: no marks "
        "(default: recent,random)",
    )
    work = parser.add_argument_group("the work")
    add_prompt_flags(work)
    work.add_argument(
        "--questions",
        metavar="K",
        type=typed.count(1),
        default=1,
        help="asked of one context, where the task can; query-agnostic, they share its compressed KVs (default: 1)",
    )
    work.add_argument(
        "--shots", metavar="N", type=typed.count(0), help="worked examples in front; left out: the task's own"
    )
    work.add_argument("--categories", metavar="A,...", type=typed.names, default=(), help="only these")
    add_data_flag(work)
    work.add_argument(
        "--chat",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether prompts go through the model's chat template; auto: where the task says so",
    )
    add_output_flags(parser)
    add_model_argument(parser)
    add_engine_flags(parser, OF_CELLS, {"kv_floor": KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Evaluate, show, write, and return the exit code."""
    from winnow_lab.evaluate.result_files import JOURNAL

    options = evaluation_options(namespace)
    check_output(namespace, options, JOURNAL)
    check_data(namespace)
    from winnow_lab.evaluate.cell import engine_needs, plan_cells

    controls = () if namespace.controls == ("none",) else namespace.controls
    cells = plan_cells(namespace.presets, cell_amounts(namespace), _QUERIES[namespace.query], controls)
    options = {"kv_floor": KV_FLOOR} | engine_needs(cells) | options
    with open_llm(options) as llm:
        plan = _plan(namespace, llm, cells, controls)
        head = _head(namespace, llm, plan, options)
        try:
            evaluation = _run(namespace, llm, plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (namespace.output is not None)) from None
    _show(evaluation, head)
    if namespace.output is not None:
        _write(namespace.output, evaluation, head)
    return 0


def _plan(
    namespace: argparse.Namespace, llm: "LLM", cells: Any, controls: tuple[str, ...]
) -> "EvaluationPlan":
    from winnow_lab.evaluate.plan import EvaluationPlan
    from winnow_lab.evaluate.settings import settings_for

    settings = settings_for(
        llm,
        **prompt_settings(namespace),
        data=namespace.data,
        questions=namespace.questions,
        shots=namespace.shots,
        categories=namespace.categories,
    )
    return EvaluationPlan(namespace.task, namespace.loaded, settings, cells, controls, namespace.chat)


def _run(namespace: argparse.Namespace, llm: "LLM", plan: "EvaluationPlan") -> "Evaluation":
    from winnow_lab.evaluate.result_files import JOURNAL
    from winnow_lab.evaluate.runner import evaluate

    with show_evaluation(namespace.progress) as show:
        return evaluate(
            llm,
            plan,
            journal=None if namespace.output is None else namespace.output / JOURNAL,
            overwrite=namespace.overwrite,
            on_step=show,
        )


def _head(
    namespace: argparse.Namespace, llm: "LLM", plan: "EvaluationPlan", options: dict[str, Any]
) -> dict[str, Any]:
    return run_head(llm, options) | {
        "query": namespace.query,
        "chat": plan.chat,
        "settings": plan.settings_json(),
    }


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
