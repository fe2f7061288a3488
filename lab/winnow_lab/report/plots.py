"""Charts in one style.

matplotlib is an extra (`plots`) and is imported when something is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winnow.errors import WinnowError
from winnow.process.extras import install_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of colour vision, without the yellow, which is faint on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
_PANEL_INCHES = (5.2, 4.0)
_MANY_POINTS = 40
"""Markers would hide a line with more points."""


@dataclass(frozen=True)
class Line:
    """Points that belong together, with bars of standard `errors`. `reference` lines, such as limits, are grey."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    reference: bool = False
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Axis:
    """Axis of a plot: the quantity along a side; `log2` is for doublings, whose ticks it labels.

    `ticks` are the names of what stands at 0, 1, 2 and so on, on an axis of things that have an order alone.
    """

    label: str
    scale: Literal["linear", "log2"] = "linear"
    low: float | None = None
    high: float | None = None
    ticks: Sequence[str] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def line_chart(panels: Sequence[Panel], title: str = "", columns: int = 2) -> "Figure":
    """Return panels side by side, `columns` in a row. Lines with the same label look alike in all of them."""
    rows = -(-len(panels) // columns)
    figure = _figure(min(columns, len(panels)), rows, title)
    labels = dict.fromkeys(line.label for panel in panels for line in panel.lines if not line.reference)
    looks = {label: _look(number) for number, label in enumerate(labels)}
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, min(columns, len(panels)), number)
        for line in panel.lines:
            look = {"color": "grey", "linestyle": ":"} if line.reference else dict(looks[line.label])
            if len(line.x) > _MANY_POINTS:
                look.pop("marker", None)
            look |= {"label": line.label, "linewidth": 1.5, "markersize": 4.5}
            if line.errors:
                axes.errorbar(line.x, line.y, yerr=line.errors, capsize=3, **look)
            else:
                axes.plot(line.x, line.y, **look)
        axes.set_title(panel.title, fontsize="medium")
        _set_axis(axes, "x", panel.x)
        _set_axis(axes, "y", panel.y)
        axes.grid(alpha=0.25)
        if panel.lines:
            axes.legend(fontsize="small", framealpha=0.8)
    return figure


def heat_map(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], y_label: str, x_label: str
) -> "Figure":
    """Draw shares between 0 and 1 as a grid with the numbers in it: values[row][column]."""
    figure = _figure(1, 1, "")
    axes = figure.add_subplot()
    image = axes.imshow(values, vmin=0.0, vmax=1.0, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            shade = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=shade, fontsize="small")
    figure.colorbar(image)
    return figure


def save_figure(figure: "Figure", stem: Path) -> Path:
    from matplotlib import rc_context

    path = stem.with_name(f"{stem.name}.svg")
    # Text stays text. Without a date and random names a figure that did not change stays the same.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "winnow"}):
        figure.savefig(path, metadata={"Date": None})
    return path


def _figure(columns: int, rows: int, title: str) -> "Figure":
    if not can_draw():
        raise WinnowError(f"drawing needs matplotlib: {install_hint('plots', './lab')}")
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def _look(number: int) -> dict[str, Any]:
    turn, place = divmod(number, len(_COLOURS))
    return {
        "color": _COLOURS[place],
        "marker": _MARKERS[(place + turn) % len(_MARKERS)],
        "linestyle": _DASHES[turn % len(_DASHES)],
    }


def _set_axis(axes: Any, side: Literal["x", "y"], axis: Axis) -> None:
    axes.set(**{f"{side}label": axis.label})
    if axis.ticks:
        getattr(axes, f"set_{side}ticks")(range(len(axis.ticks)), axis.ticks, rotation=20)
    if axis.scale == "log2":
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        getattr(axes, f"set_{side}scale")("log", base=2)
        shown = getattr(axes, f"{side}axis")
        shown.set_major_locator(LogLocator(base=2))
        shown.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        shown.set_minor_formatter(NullFormatter())
    if axis.low is not None or axis.high is not None:
        axes.set(**{f"{side}lim": (axis.low, axis.high)})
