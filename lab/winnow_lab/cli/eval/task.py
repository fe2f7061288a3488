"""One task of `winnow eval`: its flags, and from what was typed to tables and files."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from winnow.process.extras import install_hint
from winnow_lab.cli.eval.options import EvalOptions, show_tables, show_work
from winnow_lab.evaluate.prompt import CHAT_MODES
from winnow_lab.evaluate.result import JOURNAL
from winnow_lab.evaluate.tasks import Task
from winnow_lab.study import flag
from winnow_lab.study.options import options_of

ARGUMENTS = ""
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
    query: str = flag(
        "both", "whether policies judge the question too, or the context alone", choices=_QUERIES
    )
    control: tuple[str, ...] = flag(
        ("recent", "random"), "presets that mark categories as uninformative; none: no marks"
    )
    samples: int | None = flag(None, "of each category (default: the task's own)", least=1)
    tokens: tuple[int, ...] = flag((1024,), "of prompt and answer, where the task's length is free", least=1)
    seed: int = flag(0, "of the prompts", least=0)
    questions: int = flag(1, "of one context, where the task can; agnostic ones share its KVs", least=1)
    shots: int | None = flag(None, "worked examples in front (default: the task's own)", least=0)
    categories: tuple[str, ...] = flag((), "only these")
    data: Path | None = flag(None, "folder of the task's files (default: the sample that ships)")
    chat: str = flag("auto", "through the model's chat template; auto: as the task says", choices=CHAT_MODES)
    JOURNAL: ClassVar[str] = JOURNAL


def texts(task: Task) -> tuple[str, str]:
    summary = f"{task.summary[:1].upper()}{task.summary[1:]}."
    described = EPILOG.format(categories=", ".join(task.categories)).replace("%", "%%")
    return DESCRIPTION.format(summary=summary), described


def execute(namespace: argparse.Namespace) -> int:
    asked = options_of(Options, namespace)
    from winnow_lab.evaluate.cell import plan_cells
    from winnow_lab.evaluate.plan import EvaluationPlan
    from winnow_lab.evaluate.result_tables import RESULTS, TABLES, all_tables, write_report
    from winnow_lab.evaluate.runner import evaluate
    from winnow_lab.evaluate.tasks.task import settings_for
    from winnow_lab.report.plots import can_draw

    controls = () if asked.control == ("none",) else asked.control
    presets = tuple(dict.fromkeys(asked.eviction))
    cells = plan_cells(presets, asked.amounts, _QUERIES[asked.query], controls)
    with asked.open_engine(cells) as (llm, head):
        names = ("samples", "seed", "data", "questions", "shots", "categories")
        own = {name: getattr(asked, name) for name in names} | {"tokens": tuple(sorted(set(asked.tokens)))}
        settings = settings_for(llm, **own)
        plan = EvaluationPlan(namespace.task, namespace.loaded, settings, cells, controls, asked.chat)
        head |= {"query": asked.query, "chat": plan.chat, "settings": plan.settings_json()}
        with show_work(asked.progress) as show:
            found = evaluate(llm, plan, journal=asked.journal, overwrite=asked.overwrite, on_step=show)
    show_tables(head, f"{found.prompts} prompts per cell", all_tables(found))
    if asked.output is not None:
        pictures = len(write_report(found, asked.output, head)) - 2
        print(f"winnow: wrote {RESULTS}, {TABLES} and {pictures} pictures in {asked.output}", file=sys.stderr)
        if not can_draw():
            hint = install_hint("plots", "./lab")
            print(f"winnow: no plots: drawing needs matplotlib: {hint}", file=sys.stderr)
    return 0
