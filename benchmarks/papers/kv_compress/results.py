"""What the runs of KV-Compress's experiment come to: rows, tables, figures, and what the paper reports."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.harness import median_and_range, save_figures
from benchmarks.papers.kv_compress.protocol import FULL, Cell, Grid, Run, Study
from winnow.figures import Axis, Line, Panel, line_chart
from winnow.text_table import TextTable
from winnow.units import format_bytes

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
        told: dict[str, Any] = {
            "context": self.cell.context,
            "preset": self.cell.preset,
            "compression": self.cell.compression,
            "runs": len(self.runs),
            "total_rate": median,
            "total_rate_least": least,
            "total_rate_most": most,
        }
        told |= {name: getattr(self, name) for name in ("gain", "bound", "share", "own_bound")}
        of_run = ("reached", "mean_batch", "most_batch", "preemptions", "rounds", "kv_bytes_peak", "accuracy")
        return told | {name: getattr(self.first, name) for name in of_run}


def read_rows(study: Study) -> list[Row]:
    """The cells that were measured with all that they are compared with, by context, compression and policy."""
    return list(_rows(study))


def _rows(study: Study) -> Iterator[Row]:
    def runs(cell: Cell) -> tuple[Run, ...]:
        return tuple(study.runs.get(cell, ()))

    for context in study.grid.contexts:
        full, prefill = runs(Cell(context)), runs(Cell(context, prefill_only=True))
        if not full or not prefill:
            continue
        yield Row(Cell(context), full, full, prefill)
        for cell in study.grid.compressed(context):
            own = runs(Cell(context, cell.preset, cell.compression, prefill_only=True))
            if found := runs(cell):
                yield Row(cell, found, full, prefill, own if cell.preset == study.grid.p_and_d else ())


def all_tables(grid: Grid, rows: Sequence[Row]) -> list[TextTable]:
    """Of each context: both policies side by side, then what belongs to each run; the paper's numbers last."""
    tables = []
    for context in grid.contexts:
        of_context = [row for row in rows if row.cell.context == context]
        if of_context:
            tables += [side_by_side(grid, of_context), details(grid, of_context)]
    return [*tables, beside_the_paper(grid, rows)]


def side_by_side(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """A line per compression of one context: the bound, then each policy's gain, share of the bound and batch."""
    context = rows[0].cell.context
    lines = []
    for compression in sorted({row.cell.compression for row in rows}):
        same = [row for row in rows if row.cell.compression == compression]
        line = [f"{same[0].bound:.2f}x"]
        for preset in grid.policies:
            # The full cache stands on both sides.
            row = next((row for row in same if row.cell.preset in (preset, FULL)), None)
            line += ["", "", "", ""] if row is None else _brief(row)
        lines.append((f"{compression:g}x", tuple(line)))
    columns = ("gain", "of bound", "batch", "score")
    return TextTable(
        f"{context} + {grid.answer_tokens(context)} tokens: whole-prompt prefill, then P&D",
        "asked",
        ("bound", *columns, f"P&D {columns[0]}", *columns[1:]),
        tuple(lines),
    )


def details(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """A line per cell of one context."""
    context = rows[0].cell.context
    return TextTable(
        f"{context} + {grid.answer_tokens(context)} tokens, each policy",
        "policy",
        (
            "asked",
            "reached",
            "tokens/s",
            "spread",
            "bound",
            "own",
            "mean",
            "most",
            "preempt",
            "rounds",
            "KV peak",
        ),
        tuple((_policy(grid, row), _detail(row)) for row in rows),
    )


def beside_the_paper(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """The paper's gains, each beside ours at the same compression over the nearest context."""
    lines = []
    for each in PUBLISHED:
        at = [row for row in rows if row.cell.compression == each.compression]
        wanted = int(each.context or 6000)
        ours = []
        for preset in grid.policies:
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
    return [f"{row.gain:.2f}x", f"{row.share:.0%}", f"{row.first.most_batch}", _accuracy(row)]


def _policy(grid: Grid, row: Row) -> str:
    return {FULL: "full", grid.whole: "whole", grid.p_and_d: "P&D"}[row.cell.preset]


def _detail(row: Row) -> tuple[str, ...]:
    run = row.first
    median, least, most = row.rates
    return (
        f"{row.cell.compression:g}x",
        f"{run.reached:.1f}x",
        f"{median:,.0f}",
        f"{(most - least) / median:.0%}" if len(row.runs) > 1 else "one run",
        f"{row.bound:.2f}x",
        "" if row.own_bound is None else f"{row.own_bound:.2f}x",
        f"{run.mean_batch:.1f}",
        f"{run.most_batch}",
        f"{run.preemptions}",
        f"{run.rounds}",
        format_bytes(run.kv_bytes_peak),
    )


def _accuracy(row: Row) -> str:
    accuracy = row.first.accuracy
    return "" if accuracy is None else f"{accuracy:.2f}"


_COMPRESSION = Axis("compression asked for", "log2")


def draw_all(grid: Grid, rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write each figure as PNG and SVG, and return their paths.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    figures = {
        "figure1": figure_1(grid, rows),
        "figure7": figure_7(grid, rows),
        "figure8": figure_8(grid, rows),
    }
    return save_figures(figures, directory, "kv_compress")


def figure_1(grid: Grid, rows: Sequence[Row]) -> "Figure":
    """Accuracy, where it was measured, and total throughput by compression."""
    rate = Axis("total tokens/s", low=0)
    panels = []
    for preset, name in _panels(grid):
        lines = _by_compression(rows, preset, lambda row: row.rates[0])
        bounds = [
            Line(f"bound: prefill alone, {context}", [1.0, _most(rows)], [row.bound * row.rates[0]] * 2, True)
            for context, row in _full(rows).items()
        ]
        panels.append(Panel(f"Throughput, {name}", _COMPRESSION, rate, [*lines, *bounds]))
    if all(row.first.accuracy is not None for row in rows):
        scores = Axis("mean score", low=0, high=1.05)
        panels = [
            Panel(
                f"Accuracy, {name}",
                _COMPRESSION,
                scores,
                _by_compression(rows, preset, lambda row: row.first.accuracy or 0.0),
            )
            for preset, name in _panels(grid)
        ] + panels
    return line_chart(panels, "KV-Compress, figure 1")


def figure_7(grid: Grid, rows: Sequence[Row]) -> "Figure":
    """The largest decoding batch by compression."""
    highest = max(row.first.most_batch for row in rows)
    batch = Axis("largest decoding batch", "log2", low=0.8, high=2.0 * highest)
    panels = []
    for preset, name in _panels(grid):
        lines = _by_compression(rows, preset, lambda row: row.first.most_batch)
        for context, row in _full(rows).items():
            reached = [each for each in rows if each.cell.context == context and each.cell.preset == preset]
            most = max((each.first.reached for each in reached), default=1.0)
            first = row.first.most_batch
            lines.append(Line(f"in proportion, {context}", [1.0, most], [first, first * most], True))
        panels.append(Panel(name, _COMPRESSION, batch, lines))
    return line_chart(panels, "KV-Compress, figure 7")


def figure_8(grid: Grid, rows: Sequence[Row]) -> "Figure":
    """Total throughput by context."""
    full = _full(rows)
    panels = []
    for preset, name in _panels(grid):
        compressions = sorted({row.cell.compression for row in rows})
        lines = []
        for compression in compressions:
            same = [
                row
                for row in rows
                if row.cell.compression == compression and row.cell.preset in (preset, FULL)
            ]
            lines.append(
                Line(
                    f"{compression:g}x",
                    [row.cell.context for row in same],
                    [row.rates[0] for row in same],
                )
            )
        bounds = [row.bound * row.rates[0] for row in full.values()]
        lines.append(Line("bound: prefill alone", list(full), bounds, True))
        panels.append(Panel(name, Axis("tokens of a prompt"), Axis("total tokens/s", low=0), lines))
    return line_chart(panels, "KV-Compress, figure 8")


def _panels(grid: Grid) -> tuple[tuple[str, str], ...]:
    """The policies and what their panels are called."""
    return (grid.whole, "whole-prompt prefill"), (grid.p_and_d, "P&D")


def _by_compression(rows: Sequence[Row], preset: str, read: Callable[[Row], float]) -> list[Line]:
    """A line for each context; the full cache is its first point."""

    def lines() -> Iterator[Line]:
        for context in _full(rows):
            same = [r for r in rows if r.cell.context == context and r.cell.preset in (preset, FULL)]
            yield Line(f"{context} tokens", [r.cell.compression for r in same], [read(r) for r in same])

    return list(lines())


def _full(rows: Sequence[Row]) -> dict[int, Row]:
    """The full cache's row of each context."""
    return {row.cell.context: row for row in rows if row.cell.preset == FULL}


def _most(rows: Sequence[Row]) -> float:
    return max(row.cell.compression for row in rows)


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
- **spread**: most less least tokens per second over the runs, beside the median. **KV peak**: the most in use between
  two steps.

The paper's best gain is {BEST_GAIN:g}x; {BATCHES}. It does not tell {UNTOLD}.
"""
