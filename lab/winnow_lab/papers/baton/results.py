"""What the runs of BATON's experiment come to: rows, tables, figures, and what the paper reports."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from winnow.values.units import format_bytes
from winnow_lab.papers.baton.protocol import MIXED, MODES, SETS, Cell, Run, Trace, published_gain
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable, formatted
from winnow_lab.study.journal import CellJournal

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STATIC = "static"


@dataclass(frozen=True)
class Row:
    """The runs of a cell."""

    cell: Cell
    runs: tuple[Run, ...]
    static: tuple[Run, ...]
    """The same queries in static batches of the same size; empty where that was not measured."""

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def spread(self) -> float:
        """Most less least seconds, beside the median."""
        times = [run.seconds for run in self.runs]
        return (max(times) - min(times)) / self.seconds

    @property
    def gain(self) -> float | None:
        """How many times faster than the static batch."""
        return statistics.median(run.seconds for run in self.static) / self.seconds if self.static else None

    @property
    def sustained_gain(self) -> float | None:
        """Return how many times as many tokens per second as static's come while queries wait."""
        fast, slow = (
            statistics.median(run.sustained for run in runs) if runs else 0.0
            for runs in (self.runs, self.static)
        )
        return fast / slow if slow else None

    @property
    def pass_gain(self) -> float | None:
        """How many times fewer passes of the batch than static: the gain if all passes took the same time.

        None where static was not measured, and for the paged engine, whose steps mix prompts and answers.
        """
        if not self.static or not self.first.tally:
            return None
        return self.static[0].tally["passes"] / self.first.tally["passes"]

    @property
    def differing(self) -> int | None:
        """Answers whose tokens are not those of the static batch."""
        if not self.static:
            return None
        return sum(a != b for a, b in zip(self.first.digests, self.static[0].digests, strict=True))

    @property
    def first(self) -> Run:
        """Everything but time is the same in every run."""
        return self.runs[0]

    def to_json(self) -> dict[str, Any]:
        derived = ("seconds", "spread", "gain", "sustained_gain", "pass_gain", "differing")
        of_run = ("idle_share", "column_share", "kv_bytes_peak", "tally")
        entries: dict[str, Any] = asdict(self.cell) | {"runs": len(self.runs)}
        entries |= {name: getattr(self, name) for name in derived}
        return entries | {name: getattr(self.first, name) for name in of_run}


def read_rows(journal: CellJournal) -> list[Row]:
    """Return a row for each cell, sets and batch sizes together, modes in the order in which they were measured."""

    def runs(cell: Cell) -> tuple[Run, ...]:
        return tuple(map(Run.from_json, journal.rows.get(cell.key, ())))

    cells = sorted(map(Cell.of, journal.rows), key=lambda cell: (cell.query_set, cell.batch))
    return [Row(cell, runs(cell), runs(Cell(cell.query_set, STATIC, cell.batch))) for cell in cells]


_NAMES = {
    MIXED: "Mixed set, 120 queries (Table 1)",
    "short": "Short set, 30 queries (Table 2)",
    "trace": "Queries of a trace",
}


def all_tables(rows: Sequence[Row]) -> list[TextTable]:
    """Of each set: times and gains by mode and batch size, then what belongs to each cell."""
    tables = []
    for query_set in SETS:
        of_set = [row for row in rows if row.cell.query_set == query_set]
        if of_set:
            tables += [completion(query_set, of_set), details(query_set, of_set)]
    return tables


def completion(query_set: str, rows: Sequence[Row]) -> TextTable:
    """A row per mode, a column per batch size."""
    batches = sorted({row.cell.batch for row in rows})
    found = {(row.cell.mode, row.cell.batch): _brief(row) for row in rows}
    modes = [mode for mode in MODES if any((mode, batch) in found for batch in batches)]
    return TextTable(
        f"{_NAMES[query_set]}: seconds to complete, times faster than static, in brackets the paper's",
        "mode",
        tuple(f"batch {batch}" for batch in batches),
        tuple((mode, tuple(found.get((mode, batch), "") for batch in batches)) for mode in modes),
    )


def details(query_set: str, rows: Sequence[Row]) -> TextTable:
    """A row per batch size and mode."""
    ordered = sorted(rows, key=lambda row: (row.cell.batch, MODES.index(row.cell.mode)))
    title = f"{_NAMES[query_set]}: where the time goes"
    named = ((f"{row.cell.batch}, {row.cell.mode}", row) for row in ordered)
    return TextTable.of(title, "batch, mode", named, _DETAILS)


_DETAILS: Mapping[str, Callable[[Row], str]] = {
    "passes": lambda row: formatted(row.first.tally.get("passes"), "{:.0f}"),
    "while queries wait": lambda row: formatted(row.sustained_gain, "{:.2f}x"),
    "by passes": lambda row: formatted(row.pass_gain, "{:.2f}x"),
    "prefill s": lambda row: formatted(row.first.tally.get("prefill_seconds"), "{:.2f}"),
    "decode s": lambda row: formatted(row.first.tally.get("decode_seconds"), "{:.2f}"),
    "idle": lambda row: formatted(row.first.idle_share, "{:.1%}"),
    "columns": lambda row: formatted(row.first.column_share, "{:.2f}"),
    "KV peak": lambda row: format_bytes(row.first.kv_bytes_peak),
    "differ": lambda row: formatted(row.differing, "{}"),
}


def _brief(row: Row) -> str:
    paper = published_gain(row.cell.query_set, row.cell.mode, row.cell.batch)
    parts = (f"{row.seconds:.2f} s", formatted(row.gain, "{:.2f}x"), formatted(paper, "({:.2f}x)"))
    return " ".join(filter(None, parts))


def spread_lines(rows: Sequence[Row]) -> list[str]:
    """How often cells were run, and how far repeated runs differ."""
    counts = sorted({len(row.runs) for row in rows})
    if counts[-1:] == [1]:
        return ["Each cell was run once."]
    widest = max(rows, key=lambda row: row.spread)
    times = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return [
        f"Each cell was run {times} times; most less least seconds are at most {widest.spread:.0%} of the median "
        f"({widest.cell.query_set}, batch {widest.cell.batch}, {widest.cell.mode})."
    ]


def differing_lines(rows: Iterable[Row]) -> list[str]:
    """What is to be said of answers that are not the same in all modes."""
    others = [row for row in rows if row.differing]
    if not others:
        return ["All modes gave the same tokens to every query."]
    return [
        f"{row.cell.query_set}, batch {row.cell.batch}, {row.cell.mode}: {row.differing} of "
        f"{len(row.first.digests)} answers differ from static's."
        for row in others
    ]


_MIB = 2**20


def figures(rows: Sequence[Row]) -> "dict[str, Callable[[], Figure]]":
    """Return figures 5 to 7 of the paper, drawn from our rows, by what their files' names add."""
    wanted: dict[str, tuple[str, str, Callable[[Trace], Sequence[float]]]] = {
        "_figure5": ("Figure 5: queries completed", "completed queries", lambda trace: trace.completed),
        "_figure6": ("Figure 6: tokens of answers", "tokens", lambda trace: trace.tokens),
        "_figure7": ("Figure 7: KV memory", "MiB", lambda trace: [held / _MIB for held in trace.kv_bytes]),
    }
    return {name: partial(_chart, rows, *each) for name, each in wanted.items()}


def _chart(rows: Sequence[Row], title: str, label: str, read: Callable[[Trace], Sequence[float]]) -> "Figure":
    """A panel for each set and batch size, a line for each mode: the first run of the cell."""
    places = dict.fromkeys((row.cell.query_set, row.cell.batch) for row in rows)
    panels = []
    for query_set, batch in places:
        lines = [
            Line(row.cell.mode, row.first.trace.seconds, read(row.first.trace))
            for row in rows
            if (row.cell.query_set, row.cell.batch) == (query_set, batch)
        ]
        panels.append(
            Panel(f"{query_set} set, batch {batch}", Axis("seconds", low=0), Axis(label, low=0), lines)
        )
    return line_chart(panels, f"BATON, {title[0].lower()}{title[1:]}", columns=3)


TITLE = "BATON: four ways to batch"
NOTES = """\
- **seconds to complete**: from the first submission, all queries at once, to the last token; medians where a cell was
  run more than once. Prompts are passages of prose, answers greedy. The end of text does not end them, a drawn length
  does, so that all modes compute the same. As in the paper a set is not replenished: at its end batches run empty.
- **while queries wait**: tokens per second beside static's up to the last step behind which a query waited, so that the
  end, where batches run empty, does not count: "if the processed queries is replenished continuously, the throughput
  improvement will not decline" (5.2.2). `--rate` lets them arrive as a Poisson process.
- **passes**: forward passes of the running batch. **by passes**: static's passes over these: the gain if all took the
  same time.
- **idle**: positions that were padding or of no query, of all computed, prefills included.
- **columns**: columns that the batch held over its longest unfinished query, summed over passes; 1 is the bound.
- **KV peak**: most memory of KVs after a step: tensors with their free columns, and KVs that wait outside the batch.
- **differ**: answers whose tokens are not static's.
- **shaping-gaps** is shaping as in the paper (4.1): a query that joins leaves its width of padding in the others' rows,
  which every later pass attends to (before their tokens here, between them there). `shaping` is what Winnow makes of
  it: rows end together, and no padding is kept. The paper's 1.75x and 1.29x are embedding over the former.
- Table 2 names its method as Table 1 names the one without P&D (`shaping-gaps`); its gains stand beside both. At batch
  4 it prints 1.89x, its seconds give 1.87x.
- Answers of a to b tokens let a batch of n need at most nb / (b + (n - 1)a) times fewer passes, in the order that
  favours it most: 1.79x at batch 2 with 24 to 200. 1.94x there takes passes that are themselves slower in the baseline.
  Here static batches share cache, kernels and steps with the other modes.
"""
