"""Figures 1, 7 and 8 of the paper, drawn from our rows. Needs matplotlib."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.papers.kv_compress.grid import FULL, Grid
from benchmarks.papers.kv_compress.row import Row
from winnow.figures import Axis, Line, Panel, line_chart, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    return [
        path
        for name, figure in figures.items()
        for path in save_figure(figure, directory / f"kv_compress_{name}")
    ]


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
