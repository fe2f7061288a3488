"""What the runs of KV-Compress's experiment come to: rows, tables, figures, and what the paper reports."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from winnow.values.units import format_bytes
from winnow_lab.papers.harness import Columns, formatted, median_and_range
from winnow_lab.papers.kv_compress.measure import FULL, Cell, Options, Run, runs_of
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable
from winnow_lab.study.journal import CellJournal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

L4 = "Llama-3.1-8B on an L4"
H100 = "Llama-3.1-70B FP8 on an H100"
_GPU = "model, GPU, vLLM"


@dataclass(frozen=True)
class Published:
    """One number of section 5.4: total throughput beside vLLM 0.6.0 with the full cache, prompts prefilled whole."""

    setting: str
    context: str
    """Tokens of the prompts; empty where the text does not say."""
    compression: float
    gain: float
    differs: str
    """From every setting of ours."""


PUBLISHED = (
    Published(L4, "6000", 64.0, 5.18, f"{_GPU}, prompts of 6000"),
    Published(L4, "6000", 32.0, 4.93, f"{_GPU}, prompts of 6000"),
    Published(L4, "500", 4.0, 2.54, f"{_GPU}, prompts of 500"),
    Published(L4, "500", 2.0, 2.0, f"{_GPU}, prompts of 500"),
    Published(H100, "", 64.0, 2.14, _GPU),
    Published(H100, "", 8.0, 1.8, _GPU),
)
BEST_GAIN = max(each.gain for each in PUBLISHED)
BATCHES = "decoding batches of over 100 were reached with both models (5.6)"
UNTOLD = "lengths of answers, and how many sequences the full cache held"


@dataclass(frozen=True)
class Row:
    """A cell beside those that it is compared with.

    Times are compared within one turn through all cells, in which a slow machine slowed all of them; of the turns the
    median counts.
    """

    cell: Cell
    runs: tuple[Run, ...]
    full: tuple[Run, ...]
    prefill: tuple[Run, ...]
    """The same prompts with one new token each, no eviction."""
    own_prefill: tuple[Run, ...] = ()
    """The same under this cell's policy and compression, where that was measured."""

    @property
    def gain(self) -> float:
        """Total tokens per second beside the full cache's."""
        return self._median(self.full, self.runs)

    @property
    def bound(self) -> float:
        """The gain if decoding took no time: of the full cache's time only prefill's is left.

        Compression after the prompt cannot pass it. Rounds within the prompt can: they shorten attention there too.
        """
        return self._median(self.full, self.prefill)

    @property
    def share(self) -> float:
        """Of the bound."""
        return self._median(self.prefill, self.runs)

    @property
    def own_bound(self) -> float | None:
        """The bound with prefill as fast as it is under this policy; None where that was not measured."""
        return self._median(self.full, self.own_prefill) if self.own_prefill else None

    @property
    def first(self) -> Run:
        """Batches, rounds and answers are the same in every run."""
        return self.runs[0]

    @property
    def is_scored(self) -> bool:
        """Whether the full cache's score can be divided by."""
        return self.kept_score is not None

    @property
    def kept_score(self) -> float | None:
        """Score over the full cache's; None where there is nothing to divide."""
        return _over(self.first.accuracy, self.full[0].accuracy)

    def kept_of(self, category: str) -> float | None:
        """The same of one category."""
        return _over(self.first.by_category.get(category), self.full[0].by_category.get(category))

    @property
    def round_seconds(self) -> float:
        """Of the rounds of a run, the median."""
        return statistics.median(run.parts.get("evict", 0.0) for run in self.runs)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Total tokens per second: median, least, most."""
        return median_and_range(run.total_rate for run in self.runs)

    @staticmethod
    def _median(before: tuple[Run, ...], after: tuple[Run, ...]) -> float:
        return statistics.median(
            one.seconds / other.seconds for one, other in zip(before, after, strict=False)
        )

    def to_json(self) -> dict[str, Any]:
        """What tables show, by name."""
        median, least, most = self.rates
        entries: dict[str, Any] = {
            "context": self.cell.context,
            "preset": self.cell.preset,
            "compression": self.cell.compression,
            "runs": len(self.runs),
            "total_rate": median,
            "total_rate_least": least,
            "total_rate_most": most,
        }
        own = ("gain", "bound", "share", "own_bound", "kept_score", "round_seconds")
        entries |= {name: getattr(self, name) for name in own}
        of_run = ("reached", "mean_batch", "most_batch", "preemptions", "rounds", "kv_bytes_peak", "accuracy")
        return entries | {name: getattr(self.first, name) for name in of_run}


def _over(score: float | None, full: float | None) -> float | None:
    return score / full if full and score is not None else None


def read_rows(options: Options, journal: CellJournal) -> list[Row]:
    """Return the cells measured with all that they are compared with, by context, compression and policy."""
    return list(_rows(options, journal))


def _rows(options: Options, journal: CellJournal) -> Iterator[Row]:
    for context in options.cell_contexts:
        full, prefill = (runs_of(journal, Cell(context, prefill_only=only)) for only in (False, True))
        if not full or not prefill:
            continue
        yield Row(Cell(context), full, full, prefill)
        for cell in options.compressed(context):
            own = runs_of(journal, Cell(context, cell.preset, cell.compression, prefill_only=True))
            if found := runs_of(journal, cell):
                yield Row(cell, found, full, prefill, own if cell.preset == options.p_and_d else ())


def all_tables(options: Options, rows: Sequence[Row]) -> list[TextTable]:
    """Of each context: both policies side by side, then what belongs to each run; the paper's numbers last."""
    tables = []
    for context in options.cell_contexts:
        of_context = [row for row in rows if row.cell.context == context]
        if of_context:
            tables += [side_by_side(options, of_context), details(options, of_context)]
            if len(of_context[0].first.by_category) > 1:
                tables.append(by_category(options, of_context))
    if any(row.is_scored for row in rows):
        tables.append(by_context(options, rows))
    return [*tables, beside_the_paper(options, rows)]


def side_by_side(options: Options, rows: Sequence[Row]) -> TextTable:
    """A line per compression of one context: the bound, then each policy's gain, share of the bound and batch."""
    context = rows[0].cell.context
    lines = []
    for compression in sorted({row.cell.compression for row in rows}):
        same = [row for row in rows if row.cell.compression == compression]
        line = [f"{same[0].bound:.2f}x"]
        for preset in options.policies:
            # The full cache stands on both sides.
            row = next((row for row in same if row.cell.preset in (preset, FULL)), None)
            line += ["", "", "", ""] if row is None else _brief(row)
        lines.append((f"{compression:g}x", tuple(line)))
    columns = ("gain", "of bound", "batch", "score")
    return TextTable(
        f"{options.lengths(context)}: whole-prompt prefill, then P&D",
        "asked",
        ("bound", *columns, f"P&D {columns[0]}", *columns[1:]),
        tuple(lines),
    )


def details(options: Options, rows: Sequence[Row]) -> TextTable:
    """A line per cell of one context."""
    context = rows[0].cell.context
    names = {FULL: "full", options.whole: "whole", options.p_and_d: "P&D"}
    title = f"{options.lengths(context)}, each policy"
    return TextTable.of(title, "policy", ((names[row.cell.preset], row) for row in rows), _DETAILS)


def by_category(options: Options, rows: Sequence[Row]) -> TextTable:
    """Return the scores of a context by category, in per cent of the full cache's (figures 4 and 6)."""
    full = rows[0].full[0].by_category
    lines = [("full, score", tuple(f"{mean:.2f}" for mean in full.values()))]
    lines += [
        (_policy(row.cell), tuple(formatted(row.kept_of(name), "{:.0%}") for name in full))
        for row in rows
        if row.cell.preset != FULL
    ]
    title = f"{options.lengths(rows[0].cell.context)}: score in per cent of the full cache's"
    return TextTable(title, "policy", tuple(full), tuple(lines))


def by_context(options: Options, rows: Sequence[Row]) -> TextTable:
    """Return the scores of all categories by context, in per cent of the full cache's (figures 1a and 2a)."""
    full = _full(rows)
    lines = [("full, score", tuple(formatted(row.first.accuracy, "{:.2f}") for row in full.values()))]
    for policy in dict.fromkeys(_policy(row.cell) for row in rows if row.cell.preset != FULL):
        kept = {row.cell.context: row.kept_score for row in rows if _policy(row.cell) == policy}
        lines.append((policy, tuple(formatted(kept.get(context), "{:.0%}") for context in full)))
    title = "Score in per cent of the full cache's, by tokens of the prompt"
    return TextTable(title, "policy", tuple(map(options.lengths, full)), tuple(lines))


def _policy(cell: Cell) -> str:
    return f"{cell.preset} {cell.compression:g}x"


def _spread(row: Row) -> str:
    median, least, most = row.rates
    return f"{(most - least) / median:.0%}" if len(row.runs) > 1 else "one run"


_DETAILS: Columns[Row] = {
    "asked": lambda row: f"{row.cell.compression:g}x",
    "reached": lambda row: f"{row.first.reached:.1f}x",
    "tokens/s": lambda row: f"{row.rates[0]:,.0f}",
    "spread": _spread,
    "bound": lambda row: f"{row.bound:.2f}x",
    "own": lambda row: formatted(row.own_bound, "{:.2f}x"),
    "mean": lambda row: f"{row.first.mean_batch:.1f}",
    "most": lambda row: f"{row.first.most_batch}",
    "preempt": lambda row: f"{row.first.preemptions}",
    "rounds": lambda row: f"{row.first.rounds}",
    "each": lambda row: f"{row.round_seconds / row.first.rounds * 1e3:.1f} ms" if row.first.rounds else None,
    "of run": lambda row: f"{row.round_seconds / statistics.median(run.seconds for run in row.runs):.1%}",
    "KV peak": lambda row: format_bytes(row.first.kv_bytes_peak),
}


def beside_the_paper(options: Options, rows: Sequence[Row]) -> TextTable:
    """The paper's gains, each beside ours at the same compression over the nearest context."""
    lines = []
    for each in PUBLISHED:
        at = [row for row in rows if row.cell.compression == each.compression]
        wanted = int(each.context or 6000)
        ours = []
        for preset in options.policies:
            candidates = [row for row in at if row.cell.preset == preset]
            nearest = min(candidates, key=lambda row: abs(row.cell.context - wanted), default=None)
            ours.append("" if nearest is None else f"{nearest.gain:.2f}x at {nearest.cell.context}")
        lines.append(
            (
                f"{each.setting}, {each.context} tokens" if each.context else each.setting,
                (f"{each.compression:g}x", f"{each.gain:.2f}x", *ours, each.differs),
            )
        )
    return TextTable(
        "The paper's gains over vLLM with the full cache (5.4), beside ours over Winnow's at the nearest context",
        "paper",
        ("compression", "gain", "ours, whole prompt", "ours, P&D", "what differs there"),
        tuple(lines),
        words=(4,),
    )


def _brief(row: Row) -> list[str]:
    run = row.first
    return [f"{row.gain:.2f}x", f"{row.share:.0%}", f"{run.most_batch}", formatted(run.accuracy, "{:.2f}")]


_COMPRESSION = Axis("compression asked for", "log2")
_KEPT = Axis("% of the full cache's score", low=0)


def figures(options: Options, rows: Sequence[Row]) -> "dict[str, Callable[[], Figure]]":
    """Return figures 1, 4, 7 and 8 of the paper, drawn from our rows, by what their files' names add."""
    highest = max(row.first.most_batch for row in rows)
    sides = {"whole-prompt prefill": options.whole, "P&D": options.p_and_d}
    shown = {side: [row for row in rows if row.cell.preset in (own, FULL)] for side, own in sides.items()}
    panels = {
        "1": [_throughput(*each) for each in shown.items()],
        "7": [_batch(*each, highest) for each in shown.items()],
        "8": [_throughput_by_context(*each) for each in shown.items()],
    }
    if judged := {side: kept for side, of in shown.items() if (kept := [row for row in of if row.is_scored])}:
        panels["1"] = [
            _by_compression(f"Accuracy, {side}", _KEPT, of, lambda row: 100 * (row.kept_score or 0.0))
            for side, of in judged.items()
        ] + panels["1"]
        first = next(iter(judged.values()))
        if len(first[0].first.by_category) > 1:
            panels["4"] = [
                _categories(f"{options.lengths(n)}, {side}", [row for row in of if row.cell.context == n])
                for n in _full(first)
                for side, of in judged.items()
            ]
    return {
        f"_figure{n}": partial(line_chart, each, f"KV-Compress, figure {n}") for n, each in panels.items()
    }


def _throughput(side: str, rows: Sequence[Row]) -> Panel:
    most = max(row.cell.compression for row in rows)
    bounds = [
        Line(f"bound: prefill alone, {context}", [1.0, most], [row.bound * row.rates[0]] * 2, True)
        for context, row in _full(rows).items()
    ]
    rate = Axis("total tokens/s", low=0)
    return _by_compression(f"Throughput, {side}", rate, rows, lambda row: row.rates[0], bounds)


def _batch(side: str, rows: Sequence[Row], highest: int) -> Panel:
    bounds = []
    for context, row in _full(rows).items():
        most = max(each.first.reached for each in rows if each.cell.context == context)
        first = row.first.most_batch
        bounds.append(Line(f"in proportion, {context}", [1.0, most], [first, first * most], True))
    batch = Axis("largest decoding batch", "log2", low=0.8, high=2.0 * highest)
    return _by_compression(side, batch, rows, lambda row: row.first.most_batch, bounds)


def _throughput_by_context(side: str, rows: Sequence[Row]) -> Panel:
    lines = []
    for compression in sorted({row.cell.compression for row in rows}):
        same = [row for row in rows if row.cell.compression == compression]
        contexts, rates = [row.cell.context for row in same], [row.rates[0] for row in same]
        lines.append(Line(f"{compression:g}x", contexts, rates))
    full = _full(rows)
    bounds = [row.bound * row.rates[0] for row in full.values()]
    lines.append(Line("bound: prefill alone", list(full), bounds, True))
    return Panel(side, Axis("tokens of a prompt"), Axis("total tokens/s", low=0), lines)


def _by_compression(
    title: str, axis: Axis, rows: Sequence[Row], read: Callable[[Row], float], bounds: Sequence[Line] = ()
) -> Panel:
    lines = []
    for context in _full(rows):
        same = [row for row in rows if row.cell.context == context]
        lines.append(
            Line(f"{context} tokens", [row.cell.compression for row in same], [read(row) for row in same])
        )
    return Panel(title, _COMPRESSION, axis, [*lines, *bounds])


def _categories(title: str, rows: Sequence[Row]) -> Panel:
    lines = []
    for name in rows[0].first.by_category:
        kept = [(row.cell.compression, share) for row in rows if (share := row.kept_of(name)) is not None]
        if kept:  # none: the full cache answers none of them
            lines.append(Line(name, [each for each, _ in kept], [100 * share for _, share in kept]))
    return Panel(title, _COMPRESSION, _KEPT, lines)


def _full(rows: Sequence[Row]) -> dict[int, Row]:
    return {row.cell.context: row for row in rows if row.cell.preset == FULL}


TITLE = "KV-Compress: throughput, batch and accuracy against compression"
NOTES = f"""\
- **gain**: total tokens per second beside the full cache within the same KV memory.
- **bound**: the gain if decoding took no time, from the time of the same prompts with one new token each, no eviction.
  Compression after the prompt cannot pass it. P&D can: its prompts attend to what was kept and at most 512 tokens more,
  so that prefill itself is faster. **own**: the bound with P&D's own prefill, where that was measured.
- **batch**, **most**, **mean**: requests that got a token in one step; the most, and the mean over the steps.
- **reached**: tokens for each KV held at an answer's end. The floor (`--kv-floor`) keeps it below what was asked for,
  and so do the answer's own tokens where no rounds come while decoding. Compressions whose budget lies below the floor
  are the same work: where they differ, the machine did.
- **score**: where prompts are tasks, the mean over the very answers that were timed, cut at the model's end of text.
  The question stands last. A round after the prompt has seen it (query-aware). P&D's rounds within the prompt have not,
  and the question cannot bring back what they took.
- **score in per cent of the full cache's**: by category and by context, as in figures 1, 2, 4 and 6; empty where the
  full cache scores nothing.
- **rounds**, **each**, **of run**: rounds of eviction, the time of one, and their share of the run's time (4.2.3).
- **spread**: most less least tokens per second over the runs, beside the median. **KV peak**: the most in use between
  two steps.

The paper's best gain is {BEST_GAIN:g}x; {BATCHES}. It does not tell {UNTOLD}.
"""
