"""Eviction presets side by side on a task, beside what papers report."""

import argparse
from pathlib import Path

from winnow.cli.flags.engine import add_engine_flags, engine_options, open_llm, silence_transformers
from winnow.cli.flags.options import add_flags, given
from winnow.eviction import PRESETS
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.cells import add_amount_flags, cell_amounts
from winnow_lab.cli.eval.display import show_evaluation
from winnow_lab.cli.eval.output import run_head, show_tables
from winnow_lab.cli.eval.prompts import prompt_settings
from winnow_lab.evaluate.cell import engine_needs, plan_cells
from winnow_lab.evaluate.plan import EvaluationPlan
from winnow_lab.evaluate.result_files import JOURNAL
from winnow_lab.evaluate.runner import evaluate
from winnow_lab.evaluate.settings import settings_for
from winnow_lab.papers.evaluations import CONTROLS, QUERIES, add_evaluation_flags, write_evaluation
from winnow_lab.papers.h2h.protocol import Continuations, text_presets
from winnow_lab.papers.h2h.results import NOTES, TITLE, picture, tables
from winnow_lab.papers.h2h.variants import VARIANTS
from winnow_lab.papers.harness import check_outputs, write_page
from winnow_lab.papers.judged import DEMO, AskedTask, chat_mode
from winnow_lab.study.page import results_json
from winnow_lab.tasks import load_task

DESCRIPTION = """\
Run a task under every eviction preset, query-aware and query-agnostic, and predict text with a quarter
of the KVs. Beside the presets that papers have numbers for stand those numbers,
and what differs in their setting.

Categories that a plain window or chance answers as well as the full cache are marked, and means
leave them out. With -o, answers reach the disk as they finish, and the same command resumes where
it was stopped.
"""
EPILOG = """\
examples:
  python -m winnow_lab.papers h2h --presets winnow,keydiff,kv-compress --compression 4,8
  python -m winnow_lab.papers h2h --presets kv-compress,snapkv-w8 --kv-budget 128,256,512,1024 --query aware
  python -m winnow_lab.papers h2h --samples 2 --windows 0
  python -m winnow_lab.papers h2h --model DIR --task ruler --categories niah_single_1 --tokens 2048 --query aware
  python -m winnow_lab.papers h2h --model DIR --text-only --presets kv-compress --window-tokens 1024
  python -m winnow_lab.papers h2h -o docs/results --journal h2h-work
"""
# They decide themselves how much they keep, which is no compression to compare at.
_NOT_COMPARED = ("full", "extreme-decode")
_OWN = ("eviction", "compression", "kv_budget", "seed", "dtype", "num_accumulators", "kv_bias")
_DEFAULTS = {"kv_floor": 1}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    presets = tuple(name for name in (*PRESETS, *VARIANTS) if name not in _NOT_COMPARED)
    add_evaluation_flags(parser, presets, samples=3)
    add_amount_flags(parser, (2.0, 4.0, 8.0, 16.0))
    add_flags(parser, AskedTask, "the task", defaults={"task": DEMO})
    parser.add_argument(
        "--categories", metavar="A,B,...", type=typed.names, default=(), help="(default: all)"
    )
    parser.add_argument("--text-only", action="store_true", help="no task: perplexity alone")
    parser.add_argument(
        "--windows",
        metavar="N",
        type=typed.count(0),
        default=4,
        help="of text to predict; 0: no perplexity (default: %(default)s)",
    )
    parser.add_argument(
        "--window-tokens",
        metavar="N",
        type=typed.count(16),
        default=2048,
        help="of a window (default: %(default)s)",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write h2h.json, h2h.md and a picture there"
    )
    parser.add_argument(
        "--journal",
        metavar="DIR",
        type=Path,
        help="directory of the journal to resume from; default: that of -o",
    )
    add_engine_flags(parser, _OWN, _DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    options, output = engine_options(namespace), namespace.output
    journal = namespace.journal or output
    for flag, directory in (("-o", output), ("--journal", namespace.journal)):  # they may be one directory
        check_outputs(options, {}, {flag: directory and directory / "h2h.json"})
    silence_transformers()
    cells = plan_cells(
        namespace.presets, cell_amounts(namespace), QUERIES[namespace.query], CONTROLS, VARIANTS
    )
    options = _DEFAULTS | engine_needs(cells) | {"dtype": "float32"} | options
    continuations = Continuations(namespace.windows, namespace.window_tokens)
    asked = AskedTask(**given(namespace, AskedTask))
    task = asked.task or DEMO
    with open_llm(options) as llm:
        head = run_head(llm, options)
        evaluation = None
        if not namespace.text_only:
            settings = settings_for(
                llm,
                **prompt_settings(namespace),
                data=asked.data,
                shots=asked.shots,
                categories=namespace.categories,
            )
            chat = chat_mode(task, llm.tokenizer)
            plan = EvaluationPlan(task, load_task(task), settings, cells, CONTROLS, chat)
            with show_evaluation(namespace.progress) as show:
                evaluation = evaluate(llm, plan, journal=journal and journal / JOURNAL, on_step=show)
        own = [name for name in ("leverage", "keydiff", "kv-compress") if name in namespace.presets]
        presets, windows = [*text_presets(), *own], journal and journal / "windows.jsonl"
        found = continuations.measure(llm, presets, windows) if continuations.windows else []
    shown, numbers = tables(evaluation, found, continuations), [each.to_json() for each in found]
    show_tables(head, f"{evaluation.prompts} prompts per cell" if evaluation else "text alone", shown)
    if output is None:
        return 0
    if evaluation is None:
        values = results_json({**head, "perplexity": numbers}, ("perplexity",))
        (output / "h2h_text.json").write_text(values, encoding="utf-8")
        write_page(output / "h2h_text.md", TITLE, [head], [f"{head['model']}."], "", shown)
        return 0
    write_evaluation(
        output,
        TITLE,
        head,
        evaluation,
        NOTES,
        shown,
        name="h2h",
        numbers={"perplexity": numbers},
        figures=picture(evaluation, output / "h2h.svg"),
    )
    return 0
