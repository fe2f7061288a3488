"""Four ways to batch, and the paged engine, on the queries of the BATON paper."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from winnow.cli.flags.engine import (
    add_engine_flags,
    engine_options,
    model_path,
    open_llm,
    silence_transformers,
)
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import write_json
from winnow.cli.screen.meter import Meter
from winnow.cli.screen.progress import add_progress_flag, open_progress, show_steps
from winnow.config import EngineConfig, EvictionConfig
from winnow.errors import UsageError
from winnow.process.threads import set_threads
from winnow.report.fingerprint import model_digest
from winnow_lab.bench.answering import OnStep
from winnow_lab.papers.baton.protocol import Cell, Cells, Experiment, Measured
from winnow_lab.papers.baton.results import (
    NOTES,
    TITLE,
    all_tables,
    differing_lines,
    draw_all,
    read_rows,
    spread_lines,
)
from winnow_lab.papers.harness import check_outputs, head_of, show_results, write_page
from winnow_lab.study.journal import ResultJournal

DESCRIPTION = """\
Answer the BATON paper's two sets of queries with each mode of the padded engine and with the paged
engine, and tell how long each takes, how much it computes without need, and what memory it holds.

  mixed   120 queries: long prompt and short answer, short and long, short and short as 1:1:2
  short   30 queries, both short

"Long" is around 4,000 words, "short" 24 to 400, in the short set 24 to 200; --scale and --short-scale
say how many tokens stand for a word. As in the paper, batch 4 doubles the mixed set's lengths. All
modes get the same queries in the same order and compute the same tokens.
"""
EPILOG = """\
examples:
  python -m winnow_lab.papers baton
  python -m winnow_lab.papers baton --sets short --batches 2,8 --modes static,embedding
  python -m winnow_lab.papers baton --repeats 3 --journal baton.journal --json baton.json -o results
  python -m winnow_lab.papers baton --sets short --rate 4 --modes static,embedding
  python -m winnow_lab.papers baton --sets mixed --batches 8 --scale 0.25 --model DIR --kv-memory 4GiB

With --journal, runs reach the disk as they end, and the same command resumes where it was stopped.
One journal serves all sets, modes and batch sizes, so that an experiment can be run in pieces; every
start shows all that its journal holds. docs/benchmarks.md says what the columns mean.
"""
_OWN = ("engine", "padded_mode", "max_num_seqs", "attention_backend", "block_size", *vars(EvictionConfig()))
"""Engine options that the bench chooses itself, or that only one of the engines knows."""
_DTYPE = "float32"
_SHOWN = {"sets": "mixed,short", "modes": "all"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="write baton.md and the figures there (needs matplotlib)",
    )
    parser.add_argument(
        "--journal", metavar="FILE", type=Path, help="keep every run there, to resume from", default=None
    )
    parser.add_argument("--overwrite", action="store_true", help="start the journal afresh")
    add_progress_flag(parser)
    add_flags(parser, Cells, "the work", defaults=_SHOWN)
    add_engine_flags(parser, _OWN, {"dtype": _DTYPE})
    # Options are checked for a padded engine, which most cells have.
    parser.set_defaults(engine="padded")


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, write, and return the exit code."""
    cells = Cells(**given(namespace, Cells))
    options = {"dtype": _DTYPE} | engine_options(namespace)
    for cell in cells:
        EngineConfig.from_options(options | {"max_num_seqs": cell.batch})
    page = namespace.output and namespace.output / "baton.md"
    files = {"--json": namespace.json, "--journal": namespace.journal}
    check_outputs(options, files, {"-o": page}, figures=True)
    if namespace.overwrite and namespace.journal is None:
        raise UsageError("--overwrite starts the file of --journal afresh, which was not given")
    silence_transformers()
    set_threads(options.get("threads"))
    head = head_of(options)
    model = model_path(options)
    experiment = Experiment(cells, options, open_llm, head)
    measured = _measure(namespace, experiment, model)
    rows = read_rows(measured)
    facts = _facts(cells, options) + spread_lines(rows) + differing_lines(rows)
    tables = all_tables(rows)
    show_results([head], [" ".join(facts)], tables)
    report = {"settings": cells.settings, "engine": EngineConfig.from_options(options).settings()}
    reported = {"rows": [row.to_json() for row in rows], "runs": [each.to_json() for each in measured]}
    write_json(namespace.json, head | report | reported)
    if page is not None:
        heads = {(*each.head["command"], each.head["commit"]): each.head for each in measured}
        write_page(page, TITLE, list(heads.values()), facts, NOTES, tables, draw_all(rows, page.parent))
    return 0


def _measure(namespace: argparse.Namespace, experiment: Experiment, model: Path) -> list[Measured]:
    if namespace.journal is None:
        return list(_run(experiment, [], namespace.progress))
    engine = EngineConfig.from_options(experiment.options).settings()
    del engine["model"]
    fingerprint = {"model": model_digest(model), "bench": "baton", **experiment.cells.settings, **engine}
    with ResultJournal(
        namespace.journal, fingerprint, Measured.from_json, overwrite=namespace.overwrite
    ) as journal:
        measured = list(journal.found)
        for each in _run(experiment, journal.found, namespace.progress):
            journal.append([each])
            measured.append(each)
    return measured


def _run(experiment: Experiment, found: list[Measured], mode: str) -> Iterator[Measured]:
    missing = experiment.missing(found)
    with open_progress(mode if missing else "off", sys.stderr) as progress:

        def on_step(cell: Cell) -> OnStep:
            at = f"{cell.query_set}, batch {cell.batch}, {cell.mode}"
            return show_steps(progress, Meter(), len(experiment.cells.lengths(cell)), at=at)

        yield from experiment.measure(missing, on_step)


def _facts(cells: Cells, options: dict[str, Any]) -> list[str]:
    model = options.get("model") or "the demo model"
    return [
        f"Model: {model}, {options['dtype']}.",
        f"Tokens for each of the paper's words: {cells.scale:g} in the mixed set, {cells.short_scale:g} in the short.",
        f"Seed {cells.query_seed}.",
    ]
