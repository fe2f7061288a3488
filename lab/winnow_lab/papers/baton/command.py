"""Four ways to batch, and the paged engine, on the queries of the BATON paper."""

from collections.abc import Iterator

from winnow.cli.flags.engine import silence_transformers
from winnow.process.threads import set_threads
from winnow_lab.papers.baton.protocol import Options, measure
from winnow_lab.papers.baton.results import (
    NOTES,
    TITLE,
    all_tables,
    differing_lines,
    figures,
    read_rows,
    spread_lines,
)
from winnow_lab.study import Result, as_command
from winnow_lab.study.journal import CellJournal

DESCRIPTION = """\
Answer the BATON paper's two sets of queries with each mode of the padded engine and with the paged
engine, and tell how long each takes, how much it computes without need, and what memory it holds.

  mixed   120 queries: long prompt and short answer, short and long, short and short as 1:1:2
  short   30 queries, both short
  trace   queries with the lengths and the arrivals of a production trace

"Long" is around 4,000 words, "short" 24 to 400, in the short set 24 to 200; --scale and --short-scale
say how many tokens stand for a word. As in the paper, batch 4 doubles the mixed set's lengths. All
modes get the same queries in the same order and compute the same tokens.

examples:
  python -m winnow_lab.papers baton --repeats 3 --journal baton.journal -o results
  python -m winnow_lab.papers baton --sets trace --trace AzureLLMInferenceTrace_conv.csv --short-scale 0.25 --rate 2

With --journal, runs reach the disk as they end, and the same command resumes where it was stopped.
One journal serves all sets, modes and batch sizes, so that an experiment can be run in pieces; every
start shows all that its journal holds. docs/benchmarks.md says what the columns mean.
"""


def study(options: Options) -> Iterator[Result]:
    silence_transformers()
    set_threads(options.engine.get("threads"))
    journal = CellJournal(options.journal, options.identity)
    given = (
        f"Model: {options.engine.get('model') or 'the demo model'}, {options.engine.get('dtype', 'float32')}. "
        f"Tokens for each of the paper's words: {options.scale:g} in the mixed set, {options.short_scale:g} in the "
        f"short. Seed {options.query_seed}."
    )
    if options.trace:
        given += f" {options.trace.name}: {len(options.traced)} queries, each token {options.short_scale:g}."
    for _ in measure(options, journal):
        rows = read_rows(journal)
        facts = [given, *spread_lines(rows), *differing_lines(rows), journal.origins]
        numbers = {"settings": options.identity, "rows": [row.to_json() for row in rows]}
        yield Result(TITLE, all_tables(rows), facts, NOTES, numbers, figures=figures(rows))


configure, execute = as_command(Options, study, DESCRIPTION)
