"""Tables of text, rendered for the terminal and as Markdown; rich is imported when something is printed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_Row = TypeVar("_Row")
WIDTH = 100
"""Columns where the output is no terminal."""


@dataclass(frozen=True)
class TextTable:
    """Text entries under column heads, with notes below.

    Attributes:
        corner: the head of the column of row names.
        rows: name and entries of each row.
        notes: lines below.
        words: places of the columns whose entries are words; they are aligned left as names are, the others right.
        across: the head that takes the corner's place where rows and columns change places.
    """

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()
    words: tuple[int, ...] = ()
    across: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        corner: str,
        rows: Mapping[str, _Row] | Iterable[tuple[str, _Row]],
        columns: Mapping[str, Callable[[_Row], str | None]],
        notes: Sequence[str] = (),
    ) -> "TextTable":
        """Return a table with a line for each of `rows`, by name; `columns` read its entries; None: left empty."""
        named = rows.items() if isinstance(rows, Mapping) else rows
        lines = tuple((name, tuple(read(row) or "" for read in columns.values())) for name, row in named)
        return cls(title, corner, tuple(columns), lines, tuple(notes))

    @classmethod
    def read(
        cls, title: str, head: str, lines: Iterable[str], notes: Sequence[str] = (), words: Sequence[int] = ()
    ) -> "TextTable":
        """Return a table whose head and lines have bars between their entries; the first is a row's name."""
        (corner, *columns), *rows = ([each.strip() for each in line.split("|")] for line in (head, *lines))
        entries = tuple((name, tuple(found)) for name, *found in rows)
        return cls(title, corner, tuple(columns), entries, tuple(notes), tuple(words))

    def transposed(self) -> "TextTable":
        entries = zip_longest(*(entries for _, entries in self.rows), fillvalue="")
        rows = tuple(zip(self.columns, entries, strict=True))
        columns = tuple(name for name, _ in self.rows)
        return replace(self, corner=self.across, across=self.corner, columns=columns, rows=rows, words=())

    def upright(self) -> "TextTable":
        """Return the table with the longer list down."""
        return self if len(self.rows) >= len(self.columns) else self.transposed()

    def markdown(self) -> list[str]:
        rules = ["---" if place in self.words else "---:" for place in range(len(self.columns))]
        lines = [(self.corner, *self.columns), ("---", *rules), *((name, *row) for name, row in self.rows)]
        escaped = (
            [entry.replace("|", "\\|") for entry in line] for line in lines
        )  # a bar would end an entry
        table = [f"| {' | '.join(line)} |" for line in escaped]
        notes = [*(f"{note}  " for note in self.notes), ""] if self.notes else []
        return [f"## {self.title}", "", *table, "", *notes]

    def rich(self, *, dense: bool = False) -> "Table":
        """Return the table without title and notes; `dense` omits lines between columns."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False) if dense else Table()
        table.add_column(self.corner, no_wrap=bool(self.words))
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="left" if place in self.words else "right")
        for name, entries in self.rows:
            table.add_row(name, *entries)
        return table


def formatted(value: float | None, form: str) -> str:
    """Return `value` as `form` prints it, such as "{:.2f}x"; empty where there is none."""
    return "" if value is None else form.format(value)


class Footnotes:
    """Numbered footnotes of a table; equal texts share a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self, also: Sequence[str] = ()) -> tuple[str, ...]:
        return (*(f"[{number}] {text}" for text, number in self._numbers.items()), *also)


def console() -> "Console":
    """Return a console on standard output, wide enough for tables, that prints markup verbatim."""
    from rich.console import Console

    plain = Console(markup=False, emoji=False)
    return plain if plain.is_terminal else Console(markup=False, emoji=False, width=max(plain.width, WIDTH))


def print_tables(out: "Console", tables: Iterable[TextTable], *, dense: bool = False) -> None:
    """Print each table with title and notes; `dense` as for `TextTable.rich`."""
    for table in tables:
        # A title of rich's own would be broken to the table's width.
        out.print(f"\n{table.title}", highlight=False, markup=False, soft_wrap=True)
        out.print(table.rich(dense=dense))
        for note in table.notes:
            out.print(note, highlight=False, markup=False, soft_wrap=True)
