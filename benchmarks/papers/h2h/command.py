"""`python -m benchmarks.papers h2h`: every eviction preset on the demo model, beside what papers report."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.engine import add_engine_flags, engine_options, open_llm, silence_transformers
from winnow.cli.eval import typed
from winnow.cli.eval.cells import add_compression_flag
from winnow.cli.eval.display import show_evaluation
from winnow.cli.eval.prompts import add_prompt_flags, prompt_settings
from winnow.cli.paths import require_writable
from winnow.cli.progress import add_progress_flag
from winnow.cli.report import check_written
from winnow.eviction import PRESETS

if TYPE_CHECKING:
    from benchmarks.papers.h2h.protocol import Continuations
    from winnow.evaluate.perplexity import Perplexity
    from winnow.evaluate.result import Evaluation
    from winnow.llm import LLM

DESCRIPTION = """\
Run the demo model's tasks under every eviction preset, query-aware and query-agnostic, and predict
text with a quarter of the KVs. Beside the presets that papers have numbers for stand those numbers,
and what differs in their setting.

Categories that a plain window or chance answers as well as the full cache are marked, and means
leave them out. With -o, answers reach the disk as they finish, and the same command goes on where
it was stopped.
"""
EPILOG = """\
examples:
  python -m benchmarks.papers h2h --presets winnow,keydiff,kv-compress --compression 4,8
  python -m benchmarks.papers h2h --samples 2 --windows 0
  python -m benchmarks.papers h2h -o docs/results --journal h2h-work
"""
CONTROLS = ("recent", "random")
# They decide themselves how much they keep, which is no compression to compare at.
_NOT_COMPARED = ("full", "extreme-decode")
_QUERIES = {"aware": ("aware",), "agnostic": ("agnostic",), "both": ("agnostic", "aware")}
_OWN = ("eviction", "compression", "kv_budget", "seed", "dtype", "num_scores")
_DEFAULTS = {"kv_floor": 1}
_TASK = "demo"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--presets",
        metavar="A,B,...",
        type=typed.names,
        default=tuple(name for name in PRESETS if name not in _NOT_COMPARED),
        help="default: all",
    )
    add_compression_flag(parser, (2.0, 4.0, 8.0, 16.0))
    parser.add_argument("--query", choices=_QUERIES, default="both", help="(default: both)")
    add_prompt_flags(parser, samples=3)
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
    add_progress_flag(parser)
    add_engine_flags(parser, _OWN, _DEFAULTS)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    options = engine_options(namespace)
    journal = namespace.journal or namespace.output
    for name, path in (("-o", namespace.output), ("--journal", namespace.journal)):
        check_written({name: path}, options)  # they may be one directory
    for path, flag in ((namespace.output, "-o"), (namespace.journal, "--journal")):
        if path is not None:
            require_writable(path / "h2h.json", f"{flag} {path}")
    from benchmarks.papers.h2h.protocol import Continuations, text_presets
    from benchmarks.papers.h2h.results import tables, write
    from winnow.cli.eval.output import run_head, show_tables
    from winnow.evaluate.cell import num_scores, plan_cells

    silence_transformers()
    cells = plan_cells(namespace.presets, namespace.compressions, _QUERIES[namespace.query], CONTROLS)
    options = _DEFAULTS | {"num_scores": num_scores(cells), "dtype": "float32"} | options
    continuations = Continuations(namespace.windows, namespace.window_tokens)
    with open_llm(options) as llm:
        head = run_head(llm, options)
        evaluation = _evaluate(namespace, llm, cells, journal)
        own = [name for name in ("winnow", "keydiff", "kv-compress") if name in namespace.presets]
        found = _perplexity(llm, continuations, [*text_presets(), *own], journal)
    amount = f"{evaluation.prompts} prompts per cell"
    show_tables(head, amount, tables(evaluation, found, continuations))
    if namespace.output is not None:
        paths = write(namespace.output, head, evaluation, found, continuations)
        print(f"winnow: wrote {', '.join(map(str, paths))}", file=sys.stderr)
    return 0


def _evaluate(namespace: argparse.Namespace, llm: "LLM", cells: Any, journal: Path | None) -> "Evaluation":
    from winnow.evaluate.plan import EvaluationPlan
    from winnow.evaluate.report import JOURNAL
    from winnow.evaluate.runner import evaluate
    from winnow.evaluate.settings import settings_for
    from winnow.evaluate.tasks import load_task

    settings = settings_for(llm, **prompt_settings(namespace))
    plan = EvaluationPlan(_TASK, load_task(_TASK), settings, cells, CONTROLS)
    with show_evaluation(namespace.progress) as show:
        return evaluate(llm, plan, journal=None if journal is None else journal / JOURNAL, on_step=show)


def _perplexity(
    llm: "LLM", continuations: "Continuations", presets: list[str], journal: Path | None
) -> "list[Perplexity]":
    if not continuations.windows:
        return []
    return continuations.measure(llm, presets, None if journal is None else journal / "windows.jsonl")
