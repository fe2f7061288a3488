"""Figures 5, 6 and 7 of the paper, drawn from our runs. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.baton.measured import Row
from benchmarks.papers.baton.run import Trace
from winnow.figures import Axis, Line, Panel, line_chart, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20


def draw_all(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write each figure as PNG and SVG, and return their paths.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    figures = {
        "figure5": _chart(
            rows, "Figure 5: queries completed", "completed queries", lambda trace: trace.completed
        ),
        "figure6": _chart(rows, "Figure 6: tokens of answers", "tokens", lambda trace: trace.tokens),
        "figure7": _chart(
            rows, "Figure 7: KV memory", "MiB", lambda trace: [held / _MIB for held in trace.kv_bytes]
        ),
    }
    return [
        path for name, figure in figures.items() for path in save_figure(figure, directory / f"baton_{name}")
    ]


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
