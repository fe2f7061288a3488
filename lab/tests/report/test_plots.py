from pathlib import Path

import pytest

from winnow.errors import WinnowError
from winnow_lab.report import plots
from winnow_lab.report.plots import Axis, Line, Panel, heat_map, line_chart, save_figure


def panel(labels: list[str]) -> Panel:
    lines = [Line(label, (1, 2, 4), (number, 2.0, 3.0)) for number, label in enumerate(labels)]
    return Panel("a panel", Axis("times", "log2"), Axis("score", low=0.0, high=1.0), lines)


def test_every_line_of_a_chart_looks_different() -> None:
    figure = line_chart([panel([f"line {number}" for number in range(14)])])
    drawn = figure.axes[0].lines
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 14


def test_a_line_looks_the_same_in_every_panel() -> None:
    figure = line_chart([panel(["a", "b"]), panel(["b"])])
    assert figure.axes[0].lines[1].get_color() == figure.axes[1].lines[0].get_color()
    assert figure.axes[0].lines[0].get_color() != figure.axes[1].lines[0].get_color()


def test_doublings_are_labelled_as_numbers() -> None:
    axes = line_chart([panel(["a"])]).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.xaxis.get_major_formatter()(64.0, 0) == "64"
    assert axes.get_ylim() == (0.0, 1.0)


def test_a_figure_keeps_the_dots_of_its_name(tmp_path: Path) -> None:
    svg = save_figure(heat_map([[0.0, 1.0]], ["row"], ["a", "b"], "depth", "length"), tmp_path / "map.v1")
    assert [path.name for path in tmp_path.iterdir()] == [svg.name] == ["map.v1.svg"]
    assert "<svg" in svg.read_text(encoding="utf-8")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(WinnowError, match=r"\./lab\[plots\]"):
        line_chart([panel(["a"])])
