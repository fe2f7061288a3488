"""A table before it is drawn: for the terminal, or as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest


@dataclass(frozen=True)
class Grid:
    """Text entries under column heads, with footnotes.

    Attributes:
        corner: the head of the column of row names.
        rows: name and entries of each row.
        notes: lines below.
        across: the head that takes the corner's place where rows and columns change places.
    """

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()
    across: str = ""

    def transposed(self) -> "Grid":
        """Rows as columns."""
        entries = zip_longest(*(entries for _, entries in self.rows), fillvalue="")
        rows = tuple(zip(self.columns, entries, strict=True))
        columns = tuple(name for name, _ in self.rows)
        return replace(self, corner=self.across, across=self.corner, columns=columns, rows=rows)

    def upright(self) -> "Grid":
        """The longer list down, the shorter across."""
        return self if len(self.rows) >= len(self.columns) else self.transposed()

    def markdown(self) -> list[str]:
        """The lines of the table and its notes; the title is left to the caller."""
        head = [self.corner, *self.columns]
        lines = [head, ["---", *["---:"] * len(self.columns)], *([name, *row] for name, row in self.rows)]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return [*table, "", *(f"{note}  " for note in self.notes), *[""] * bool(self.notes)]


class Footnotes:
    """Numbers for things said below a table, each said once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        """The mark that stands for `text`."""
        return f"[{self._numbers.setdefault(text, len(self._numbers) + 1)}]"

    def lines(self, also: Sequence[str] = ()) -> tuple[str, ...]:
        """Every footnote in its order, then `also`."""
        return (*(f"[{number}] {text}" for text, number in self._numbers.items()), *also)
