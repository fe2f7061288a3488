"""Every eviction preset on the demo model, beside what papers report."""

import argparse
from pathlib import Path

from benchmarks.papers.evaluations import CONTROLS, QUERIES, TASK, add_evaluation_flags, write_evaluation
from benchmarks.papers.h2h.protocol import Continuations, text_presets
from benchmarks.papers.h2h.results import NOTES, TITLE, picture, tables
from benchmarks.papers.harness import check_outputs
from winnow.cli.eval import typed
from winnow.cli.eval.display import show_evaluation
from winnow.cli.eval.output import run_head, show_tables
from winnow.cli.eval.prompts import prompt_settings
from winnow.cli.flags.engine import add_engine_flags, engine_options, open_llm, silence_transformers
from winnow.evaluate.cell import engine_needs, plan_cells
from winnow.evaluate.plan import EvaluationPlan
from winnow.evaluate.result_files import JOURNAL
from winnow.evaluate.runner import evaluate
from winnow.evaluate.settings import settings_for
from winnow.evaluate.tasks import load_task
from winnow.eviction import PRESETS

DESCRIPTION = """\
Run the demo model's tasks under every eviction preset, query-aware and query-agnostic, and predict
text with a quarter of the KVs. Beside the presets that papers have numbers for stand those numbers,
and what differs in their setting.

Categories that a plain window or chance answers as well as the full cache are marked, and means
leave them out. With -o, answers reach the disk as they finish, and the same command resumes where
it was stopped.
"""
EPILOG = """\
examples:
  python -m benchmarks.papers h2h --presets winnow,keydiff,kv-compress --compression 4,8
  python -m benchmarks.papers h2h --samples 2 --windows 0
  python -m benchmarks.papers h2h -o docs/results --journal h2h-work
"""
# They decide themselves how much they keep, which is no compression to compare at.
_NOT_COMPARED = ("full", "extreme-decode")
_OWN = ("eviction", "compression", "kv_budget", "seed", "dtype", "num_accumulators", "kv_bias")
_DEFAULTS = {"kv_floor": 1}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    presets = tuple(name for name in PRESETS if name not in _NOT_COMPARED)
    add_evaluation_flags(parser, presets, (2.0, 4.0, 8.0, 16.0), samples=3)
    parser.add_argument(
        "--windows",
        metavar="N",
        type=typed.count(0),
        default=4,
        help="of text to predict; 0: none (default: %(default)s)",
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
        "--journal", metavar="DIR", type=Path, help="keep what is done there, to go on from; left out: -o's"
    )
    add_engine_flags(parser, _OWN, _DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    options, output = engine_options(namespace), namespace.output
    journal = namespace.journal or output
    for flag, directory in (("-o", output), ("--journal", namespace.journal)):  # they may be one directory
        check_outputs(options, {}, {flag: directory and directory / "h2h.json"})
    silence_transformers()
    cells = plan_cells(namespace.presets, namespace.compressions, QUERIES[namespace.query], CONTROLS)
    options = _DEFAULTS | engine_needs(cells) | {"dtype": "float32"} | options
    continuations = Continuations(namespace.windows, namespace.window_tokens)
    with open_llm(options) as llm:
        head = run_head(llm, options)
        settings = settings_for(llm, **prompt_settings(namespace))
        plan = EvaluationPlan(TASK, load_task(TASK), settings, cells, CONTROLS)
        with show_evaluation(namespace.progress) as show:
            evaluation = evaluate(llm, plan, journal=journal and journal / JOURNAL, on_step=show)
        own = [name for name in ("leverage", "keydiff", "kv-compress") if name in namespace.presets]
        presets, windows = [*text_presets(), *own], journal and journal / "windows.jsonl"
        found = continuations.measure(llm, presets, windows) if continuations.windows else []
    shown = tables(evaluation, found, continuations)
    show_tables(head, f"{evaluation.prompts} prompts per cell", shown)
    if output is not None:
        write_evaluation(
            output,
            TITLE,
            head,
            evaluation,
            NOTES,
            shown,
            name="h2h",
            numbers={"perplexity": [each.to_json() for each in found]},
            figures=picture(evaluation, output / "h2h.svg"),
        )
    return 0
