"""What the papers' experiments share: going through cells, checking where results go, showing and writing them."""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from winnow.cli.flags.engine import check_written
from winnow.cli.flags.paths import require_writable
from winnow.errors import UsageError
from winnow.extras import install_hint
from winnow.report.provenance import Machine, report_head, typed_command
from winnow_lab.report.console import console, print_tables
from winnow_lab.report.plots import can_draw, save_figure
from winnow_lab.report.tables import TextTable
from winnow_lab.study.page import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Cell = TypeVar("_Cell")
_Row = TypeVar("_Row")
Columns = Mapping[str, Callable[[_Row], str | None]]
"""How the entries of a row are written, by the head of their column."""


# -- measuring -------------------------------------------------------------------------------------------------------


def missing(cells: Sequence[_Cell], repeats: int, runs: Mapping[_Cell, int]) -> list[_Cell]:
    """Cells that are still to be measured: all of them once, then all of them again, and so on.

    Args:
        runs: how often a cell was measured.
    """
    return [cell for turn in range(repeats) for cell in cells if runs.get(cell, 0) <= turn]


def median_and_range(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, least, most."""
    found = list(values)
    return statistics.median(found), min(found), max(found)


# -- results ---------------------------------------------------------------------------------------------------------


def check_outputs(
    options: Mapping[str, Any],
    files: Mapping[str, Path | None],
    pages: Mapping[str, Path | None] | None = None,
    *,
    figures: bool = False,
) -> None:
    """Refuse outputs that would be found unusable only after the work, or be written over something else.

    Args:
        options: the engine's, as typed.
        files: by the flag that names them; None: the flag was not given.
        pages: by the flag that names their directory.
        figures: pages come with figures.

    Raises:
        UsageError: names flag and path.
    """
    found = {flag: path for flag, path in (pages or {}).items() if path is not None}
    within = {f"the page of {flag}": path for flag, path in found.items()}
    check_written({**files, **within, **{flag: path.parent for flag, path in found.items()}}, options)
    for flag, path in files.items():
        if path is not None:
            require_writable(path, f"{flag} {path}")
    for flag, path in found.items():
        if figures and not can_draw():
            raise UsageError(f"{flag} draws figures with matplotlib: {install_hint('plots', './lab')}")
        require_writable(path, f"{flag} {path.parent}")


def head_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a report: the command as typed, date, commit, and the machine that the engine's options name."""
    return report_head(typed_command(), Machine.here(options.get("device", "auto")))


def show_results(
    heads: Iterable[Mapping[str, Any]],
    facts: Iterable[str],
    tables: Iterable[TextTable],
    *,
    dense: bool = False,
) -> None:
    """Where results were measured, what the work was, and the tables, on standard output."""
    out = console()
    for head in heads:
        where = Machine(**head["machine"])
        out.print(f"{where}; commit {head['commit']}; {head['date']}", highlight=False, soft_wrap=True)
    for fact in facts:
        out.print(fact, highlight=False, soft_wrap=True)
    print_tables(out, tables, dense=dense)


def tabulate(
    title: str, corner: str, rows: Iterable[_Row], name: Callable[[_Row], str], columns: Columns[_Row]
) -> TextTable:
    """A table with a line for each of `rows`, whose entries `columns` reads by head; None leaves an entry empty."""
    return TextTable.of(title, corner, ((name(row), row) for row in rows), columns)


def formatted(value: float | None, form: str) -> str:
    """`value` as `form` prints it, such as "{:.2f}x"; empty where there is none."""
    return "" if value is None else form.format(value)


def write_page(
    path: Path,
    title: str,
    heads: Sequence[Mapping[str, Any]],
    facts: Sequence[str],
    notes: str,
    tables: Sequence[TextTable],
    figures: Sequence[Path] = (),
) -> None:
    """Write the page of `winnow_lab.study.page`, and say so."""
    path.write_text(page(title, heads, facts, notes, tables, figures), encoding="utf-8")
    print("winnow: wrote", ", ".join(map(str, (path, *figures))), file=sys.stderr)


def save_figures(figures: Mapping[str, "Figure"], directory: Path, paper: str) -> list[Path]:
    """Write each figure, and return their paths."""
    return [save_figure(figure, directory / f"{paper}_{name}") for name, figure in figures.items()]
