"""Tables on the console."""

from collections.abc import Iterable

from rich.console import Console

from winnow_lab.report.tables import TextTable

WIDTH = 100
"""Columns where the output is no terminal."""


def console() -> Console:
    """Return a console on standard output, wide enough for tables, that prints markup verbatim."""
    plain = Console(markup=False, emoji=False)
    return plain if plain.is_terminal else Console(markup=False, emoji=False, width=max(plain.width, WIDTH))


def print_tables(out: Console, tables: Iterable[TextTable], *, dense: bool = False) -> None:
    """Print each table with title and notes; `dense` as for `TextTable.rich`."""
    for table in tables:
        # A title of rich's own would be broken to the table's width.
        out.print(f"\n{table.title}", highlight=False, markup=False, soft_wrap=True)
        out.print(table.rich(dense=dense))
        for note in table.notes:
            out.print(note, highlight=False, markup=False, soft_wrap=True)
