"""`python -m benchmarks.papers baton`: four ways to batch, and the paged engine, on the queries of the BATON paper."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.baton.cells import Cells
from winnow.cli.engine import add_engine_flags, engine_options, model_path, open_llm, silence_transformers
from winnow.cli.errors import UsageError
from winnow.cli.meter import Meter
from winnow.cli.options import add_flags, given
from winnow.cli.paths import require_writable
from winnow.cli.progress import add_progress_flag, open_progress
from winnow.cli.report import check_json_path, check_written, typed_command, write_json
from winnow.config import EngineConfig, EvictionConfig
from winnow.figures import can_draw

if TYPE_CHECKING:
    from benchmarks.papers.baton.cells import Cell
    from benchmarks.papers.baton.experiment import Experiment
    from benchmarks.papers.baton.measured import Measured, Row
    from benchmarks.papers.baton.run import OnStep
    from winnow.text_table import TextTable

DESCRIPTION = """\
Answer the BATON paper's two sets of queries with each mode of the padded engine and with the paged
engine, and tell how long each takes, how much it computes for nobody, and what memory it holds.

  mixed   120 queries: long prompt and short answer, short and long, short and short as 1:1:2
  short   30 queries, both short

"Long" is around 4,000 words, "short" 24 to 400, in the short set 24 to 200; --scale and --short-scale
say how many tokens stand for a word. As in the paper, batch 4 doubles the mixed set's lengths. All
modes get the same queries in the same order and compute the same tokens.
"""
EPILOG = """\
examples:
  python -m benchmarks.papers baton
  python -m benchmarks.papers baton --sets short --batches 2,8 --modes static,embedding
  python -m benchmarks.papers baton --repeats 3 --journal baton.journal --json baton.json -o results
  python -m benchmarks.papers baton --sets mixed --batches 8 --scale 0.25 --model DIR --kv-memory 4GiB

With --journal, runs reach the disk as they end, and the same command goes on where it was stopped.
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
        "--journal", metavar="FILE", type=Path, help="keep every run there, to go on from", default=None
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
    _check_paths(namespace, options)
    from benchmarks.papers.baton.experiment import Experiment
    from benchmarks.papers.baton.measured import read_rows
    from benchmarks.papers.baton.tables import all_tables
    from winnow.bench.machine import Machine, report_head
    from winnow.bench.vocabulary import vocab_size
    from winnow.cli.eval.output import show_tables
    from winnow.threads import set_threads

    silence_transformers()
    set_threads(options.get("threads"))
    head = report_head(typed_command(), Machine.here(options.get("device", "auto")))
    model = model_path(options)
    experiment = Experiment(cells, options, open_llm, vocab_size(model), head)
    measured = _measure(namespace, experiment, model)
    rows = read_rows(measured)
    facts = _facts(cells, rows, options)
    tables = all_tables(rows)
    show_tables(head, " ".join(facts), tables)
    report = {"settings": cells.settings, "engine": EngineConfig.from_options(options).settings()}
    told = {"rows": [row.to_json() for row in rows], "runs": [each.to_json() for each in measured]}
    write_json(namespace.json, head | report | told)
    if namespace.output is not None:
        _write_page(namespace.output, measured, facts, tables, rows)
    return 0


def _check_paths(namespace: argparse.Namespace, options: dict[str, Any]) -> None:
    page = None if namespace.output is None else namespace.output / "baton.md"
    named = {"--json": namespace.json, "--journal": namespace.journal, "the page of -o": page}
    check_written(named | {"-o": namespace.output}, options)
    check_json_path(namespace.json)
    if namespace.journal is not None:
        require_writable(namespace.journal, f"--journal {namespace.journal}")
    elif namespace.overwrite:
        raise UsageError("--overwrite starts the file of --journal afresh, which was not given")
    if namespace.output is not None:
        if not can_draw():
            raise UsageError("-o draws figures with matplotlib: pip install 'winnow-llm[plots]'")
        require_writable(namespace.output / "baton.md", f"-o {namespace.output}")


def _measure(namespace: argparse.Namespace, experiment: "Experiment", model: Path) -> "list[Measured]":
    """What the journal holds, and what it lacked."""
    if namespace.journal is None:
        return list(_run(experiment, [], namespace.progress))
    from benchmarks.papers.baton.measured import Measured
    from winnow.evaluate.journal import ResultJournal
    from winnow.fingerprint import model_digest

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


def _run(experiment: "Experiment", found: "list[Measured]", mode: str) -> "Iterator[Measured]":
    missing = experiment.missing(found)
    with open_progress(mode if missing else "off", sys.stderr) as progress:

        def on_step(cell: "Cell") -> "OnStep":
            meter, queries = Meter(), len(experiment.cells.lengths(cell))
            at = f"{cell.query_set}, batch {cell.batch}, {cell.mode}"

            def show(done: int, stats: Any) -> None:
                if progress.due():
                    progress.show(meter.snapshot(done, queries, 0, stats, at))

            return show

        yield from experiment.measure(missing, on_step)


def _facts(cells: Cells, rows: "list[Row]", options: dict[str, Any]) -> list[str]:
    from benchmarks.papers.baton.tables import differing_lines, spread_lines

    model = options.get("model") or "the demo model"
    return [
        f"Model: {model}, {options['dtype']}.",
        f"Tokens for each of the paper's words: {cells.scale:g} in the mixed set, {cells.short_scale:g} in the short.",
        f"Seed {cells.query_seed}.",
        *spread_lines(rows),
        *differing_lines(rows),
    ]


def _write_page(
    output: Path, measured: "list[Measured]", facts: list[str], tables: "list[TextTable]", rows: "list[Row]"
) -> None:
    from benchmarks.papers.baton.charts import draw_all
    from benchmarks.papers.baton.document import NOTES, TITLE
    from winnow.bench.page import page

    heads = {(*each.head["command"], each.head["commit"]): each.head for each in measured}
    figures = [path for path in draw_all(rows, output) if path.suffix == ".png"]
    text = page(TITLE, list(heads.values()), facts, NOTES, tables, figures)
    (output / "baton.md").write_text(text, encoding="utf-8")
    print(f"winnow: wrote {output / 'baton.md'} and {len(figures)} figures", file=sys.stderr)
