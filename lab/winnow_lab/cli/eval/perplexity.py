"""`winnow eval perplexity`: how well text is predicted under eviction."""

import argparse
import hashlib
import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import add_engine_flags, evaluation_options, open_llm
from winnow.cli.flags.options import add_model_argument
from winnow.cli.screen.meter import Meter
from winnow.cli.screen.progress import open_progress
from winnow.cli.screen.terminal import resume_hint
from winnow.errors import UsageError
from winnow_lab.cli.eval import typed
from winnow_lab.cli.eval.cells import (
    KV_FLOOR,
    OF_CELLS,
    add_cell_flags,
    add_data_flag,
    cell_amounts,
    check_data,
)
from winnow_lab.cli.eval.output import add_output_flags, check_output, run_head, show_tables

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.evaluate.likelihood import Keeping, Pair
    from winnow_lab.evaluate.perplexity import Perplexity

SUMMARY = "how well text is predicted under eviction: WikiText-2"
DESCRIPTION = """\
Predict WikiText-2 token by token, with the full cache and under eviction.

The text is cut into windows. Of each window the first tokens are given: they are computed, and the
policy cuts their KVs before it has seen what follows. The other tokens are forced one by one, as if
the model had chosen them, with the policy's rounds in between; they alone count. In one pass over a
window nothing would ever be evicted.

With -o, windows reach the disk as they finish, and the same command resumes where it was stopped.
"""
EPILOG = """\
examples:
  winnow eval perplexity --eviction recent,h2o,snapkv --compression 2,8
  winnow eval perplexity --eviction streaming --compression 4 --tokens 4096 --context 2048
  winnow eval perplexity --data wikitext-2 --eviction kv-compress --compression 4 -o perplexity
Four articles ship with Winnow; --data takes a directory with the whole test split, test.txt or
wiki.test.tokens. Its text has <unk> for rare words, so that numbers compare with each other, not
with those of other texts.
"""
_TOKENS = 1024
_JOURNAL = "windows.jsonl"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow eval perplexity [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_cell_flags(parser)
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--tokens",
        metavar="N",
        type=typed.count(2),
        default=_TOKENS,
        help="of a window (default: %(default)s)",
    )
    work.add_argument(
        "--context",
        metavar="N",
        type=typed.count(1),
        help="of them given, not predicted (default: half of them)",
    )
    work.add_argument(
        "--windows", metavar="N", type=typed.count(1), help="from the front; left out: the whole text"
    )
    add_data_flag(work)
    add_output_flags(parser)
    add_model_argument(parser)
    add_engine_flags(parser, OF_CELLS, {"kv_floor": KV_FLOOR})


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    options = evaluation_options(namespace)
    check_output(namespace, options, _JOURNAL)
    check_data(namespace)
    if namespace.context is None:
        namespace.context = namespace.tokens // 2
    if namespace.context >= namespace.tokens:
        raise UsageError(f"--context must be below --tokens ({namespace.tokens}), got {namespace.context}")
    from winnow_lab.evaluate.cell import AGNOSTIC, engine_needs, plan_cells
    from winnow_lab.evaluate.likelihood import Keeping
    from winnow_lab.evaluate.reports.perplexity_report import perplexity_table, write_perplexity

    cells = plan_cells(namespace.presets, cell_amounts(namespace), (AGNOSTIC,))
    keepings = {cell.label: Keeping.of(cell) for cell in cells}
    options = {"kv_floor": KV_FLOOR} | engine_needs(cells) | options
    with open_llm(options) as llm:
        windows = _windows(namespace, llm)
        work = {"tokens": namespace.tokens, "context": namespace.context, "windows": len(windows)}
        head = run_head(llm, options) | {"settings": work}
        try:
            rows = _measure(namespace, llm, windows, keepings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*[resume_hint()] * (namespace.output is not None)) from None
    title = f"perplexity of {namespace.tokens - namespace.context} tokens after {namespace.context}"
    table = perplexity_table(rows, title)
    show_tables(head, f"{len(windows)} windows", [table])
    if namespace.output is not None:
        paths = write_perplexity(rows, table, namespace.output, head)
        print(f"wrote {', '.join(path.name for path in paths)} in {namespace.output}", file=sys.stderr)
    return 0


def _windows(namespace: argparse.Namespace, llm: "LLM") -> "list[Pair]":
    from winnow.errors import EvaluationError
    from winnow_lab.evaluate.wikitext import cut_windows, wikitext

    if llm.tokenizer is None:
        raise EvaluationError("an evaluation needs a tokenizer, which the model's directory does not have")
    text = wikitext(namespace.data)
    return cut_windows(llm.tokenizer, text, namespace.tokens, namespace.context, namespace.windows)


def _measure(
    namespace: argparse.Namespace, llm: "LLM", windows: "list[Pair]", keepings: "dict[str, Keeping]"
) -> "list[Perplexity]":
    from winnow_lab.evaluate.perplexity import WindowScore, measure_perplexity
    from winnow_lab.evaluate.plan import engine_identity
    from winnow_lab.study.journal import ResultJournal

    with ExitStack() as stack:
        journal: ResultJournal[WindowScore] | None = None
        if namespace.output is not None:
            digest = hashlib.sha256(json.dumps([vars(window) for window in windows]).encode()).hexdigest()
            identity = engine_identity(llm, digest, {"task": "perplexity"})
            path = namespace.output / _JOURNAL
            journal = ResultJournal(
                path, identity, WindowScore.from_json, overwrite=namespace.overwrite, answers_alone=True
            )
            stack.enter_context(journal)
        progress = stack.enter_context(open_progress(namespace.progress, sys.stderr))
        meter = Meter()

        def keep(score: WindowScore) -> None:
            if journal is not None:
                journal.append([score])

        def show(done: int, name: str) -> None:
            if progress.due():
                total = len(keepings) * len(windows)
                progress.show(meter.snapshot(done, total, 0, llm.stats(), name))

        known: Any = () if journal is None else journal.found
        return measure_perplexity(llm, windows, keepings, known=known, on_score=keep, on_step=show)
