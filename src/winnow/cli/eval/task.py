"""One task of `winnow eval`: its flags, and from what was typed to tables and files."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.bench.report import console, typed_command
from winnow.cli.engine import add_engine_flags, engine_options, open_llm
from winnow.cli.errors import UsageError
from winnow.cli.eval import typed
from winnow.cli.meter import Meter
from winnow.cli.paths import require_writable
from winnow.cli.progress import MODES, open_progress
from winnow.evaluate.tasks import Task, load_task

if TYPE_CHECKING:
    from winnow.evaluate.plan import EvaluationPlan
    from winnow.evaluate.result import Evaluation
    from winnow.evaluate.runner import EvaluationProgress
    from winnow.llm import LLM

DESCRIPTION = """\
{summary}

Every cell of the tables is one preset at one compression, judging with the question (query-aware)
or before it (query-agnostic); the full cache is always among them. All cells see the same prompts
and run through one engine together. Categories that do not tell policies apart are marked, and
means leave them out.

With -o, answers reach the disk as they finish, and the same command goes on where it was stopped.
"""
EPILOG = """\
categories:
  {categories}
"""
_RESUME_HINT = "(finished answers are safe; run the same command again to go on)"
_QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("aware", "agnostic")}
# Of the engine's flags: chosen by cell, or with a meaning of their own here.
_OWN = ("eviction", "compression", "kv_budget", "seed")
# Compressions are reached only where nothing else holds more than they say.
_KV_FLOOR = 1


def configure(parser: argparse.ArgumentParser, name: str, task: Task) -> None:
    """Declare the arguments."""
    parser.usage = f"winnow eval {name} [options]"
    summary = f"{task.summary[:1].upper()}{task.summary[1:]}."
    parser.description = DESCRIPTION.format(summary=summary)
    parser.epilog = EPILOG.format(categories=", ".join(task.categories)).replace("%", "%%")
    cells = parser.add_argument_group("cells")
    cells.add_argument(
        "--eviction",
        dest="presets",
        metavar="A,B,...",
        type=typed.names,
        default=(),
        help="presets to compare (winnow policies lists them); left out: the full cache alone",
    )
    cells.add_argument(
        "--compression",
        dest="compressions",
        metavar="R,...",
        type=typed.compressions,
        default=(4.0,),
        help="tokens judged per KV kept; 1 is the full cache (default: 4)",
    )
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
    work.add_argument(
        "--samples", metavar="N", type=typed.count(1), help="of each category; left out: the task's own"
    )
    work.add_argument(
        "--tokens",
        metavar="N,...",
        type=typed.lengths,
        default=(1024,),
        help="of prompt and answer together, where the task's length is free (default: 1024)",
    )
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
    work.add_argument(
        "--data", metavar="DIR", type=Path, help="the task's files; left out: the sample that ships"
    )
    work.add_argument(
        "--seed",
        dest="task_seed",
        metavar="N",
        type=typed.count(0),
        default=0,
        help="of the prompts (default: 0)",
    )
    work.add_argument(
        "--chat",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether prompts go through the model's chat template; auto: where the task says so",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write tables, plots, every score and the journal"
    )
    out.add_argument("--overwrite", action="store_true", help="start afresh in DIR")
    out.add_argument(
        "--progress", choices=MODES, default="auto", help="auto: live on a terminal, else a line every 5 s"
    )
    add_engine_flags(parser, _OWN, {"kv_floor": _KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Evaluate, show, write, and return the exit code."""
    options = engine_options(namespace)
    _check_output(namespace)
    if namespace.data is not None and not namespace.data.is_dir():
        raise UsageError(f"--data must be a directory, got {str(namespace.data)!r}")
    from winnow.evaluate.cell import num_scores, plan_cells

    controls = () if namespace.controls == ("none",) or not namespace.presets else namespace.controls
    cells = plan_cells(namespace.presets, namespace.compressions, _QUERIES[namespace.query], controls)
    if len(cells) == 1:
        controls = ()
    options = {"kv_floor": _KV_FLOOR, "num_scores": num_scores(cells)} | options
    with open_llm(options) as llm:
        plan = _plan(namespace, llm, cells, controls)
        head = _head(namespace, llm, plan, options)
        try:
            evaluation = _run(namespace, llm, plan)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[_RESUME_HINT] * (namespace.output is not None)) from None
    _show(evaluation, head)
    if namespace.output is not None:
        _write(namespace.output, evaluation, head)
    return 0


def _plan(
    namespace: argparse.Namespace, llm: "LLM", cells: Any, controls: tuple[str, ...]
) -> "EvaluationPlan":
    from winnow.evaluate.plan import EvaluationPlan
    from winnow.evaluate.settings import settings_for

    settings = settings_for(
        llm,
        data=namespace.data,
        samples=namespace.samples,
        tokens=namespace.tokens,
        questions=namespace.questions,
        shots=namespace.shots,
        categories=namespace.categories,
        seed=namespace.task_seed,
    )
    return EvaluationPlan(
        namespace.task, load_task(namespace.task), settings, cells, controls, namespace.chat
    )


def _run(namespace: argparse.Namespace, llm: "LLM", plan: "EvaluationPlan") -> "Evaluation":
    from winnow.evaluate.report import JOURNAL
    from winnow.evaluate.runner import evaluate

    with open_progress(namespace.progress, sys.stderr) as progress:
        meter = Meter()

        def show(now: "EvaluationProgress") -> None:
            if progress.due():
                progress.show(meter.snapshot(now.done, now.total, 0, now.stats, now.cell))

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
    """What every output begins with."""
    import torch

    from winnow.bench.machine import Machine, report_head

    device = options.get("device", "auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llm.config.model.model
    return report_head(typed_command(), Machine.here(device)) | {
        "model": "the demo model" if model is None else str(model),
        "engine": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        "query": namespace.query,
        "chat": plan.chat,
        "settings": plan.settings_json(),
    }


def _show(evaluation: "Evaluation", head: dict[str, Any]) -> None:
    """The tables on standard output."""
    from rich.table import Table

    from winnow.evaluate.tables import all_grids

    out = console()
    machine = head["machine"]
    device = machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"
    out.print(
        f"{device}; commit {head['commit']}; {head['date']}; {evaluation.prompts} prompts per cell",
        highlight=False,
    )
    for grid in all_grids(evaluation):
        table = Table(title=grid.title, title_justify="left", caption_justify="left")
        table.add_column(grid.corner)
        for column in grid.columns:
            table.add_column(column, justify="right")
        for name, entries in grid.rows:
            table.add_row(name, *entries)
        out.print(table)
        for note in grid.notes:
            out.print(note, highlight=False, markup=False, soft_wrap=True)


def _write(directory: Path, evaluation: "Evaluation", head: dict[str, Any]) -> None:
    from winnow.evaluate.report import write_report
    from winnow.figures import can_draw

    paths = write_report(evaluation, directory, head)
    print(f"wrote {', '.join(path.name for path in paths)} in {directory}", file=sys.stderr)
    if not can_draw():
        print("winnow: no plots: drawing needs matplotlib, pip install 'winnow-llm[plots]'", file=sys.stderr)


def _check_output(namespace: argparse.Namespace) -> None:
    """Refuse an output directory that would be found unusable only after the work.

    Raises:
        UsageError: it is a file, or cannot be written to; --overwrite without it.
    """
    output: Path | None = namespace.output
    if output is None:
        if namespace.overwrite:
            raise UsageError("--overwrite needs -o DIR: there is nothing to replace")
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o must be a directory, got the file {str(output)!r}")
    require_writable(output / "results.json", f"-o {output}")
