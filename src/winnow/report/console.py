"""Tables on the console."""

from collections.abc import Iterable

from rich.console import Console

from winnow.report.tables import TextTable

WIDTH = 100
"""Columns where the output is no terminal."""


def console() -> Console:
    """Standard output, wide enough for the tables; text stands there as it is, also where it reads like markup."""
    plain = Console(markup=False, emoji=False)
    return plain if plain.is_terminal else Console(markup=False, emoji=False, width=max(plain.width, WIDTH))


def print_tables(out: Console, tables: Iterable[TextTable], *, dense: bool = False) -> None:
    """Each table between its title and its notes; `dense` as for `TextTable.rich`."""
    for table in tables:
        # A title of rich's own would be broken to the table's width.
        out.print(f"\n{table.title}", highlight=False, markup=False, soft_wrap=True)
        out.print(table.rich(dense=dense))
        for note in table.notes:
            out.print(note, highlight=False, markup=False, soft_wrap=True)
