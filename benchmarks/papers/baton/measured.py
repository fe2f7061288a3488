"""Runs of cells, as the journal keeps them, and what the runs of a cell come to beside the static batch."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.papers.baton.cells import Cell
from benchmarks.papers.baton.run import Run

STATIC = "static"


@dataclass(frozen=True)
class Measured:
    """One run of a cell.

    Attributes:
        head: command, date, commit and machine of the start that made it (`winnow.bench.machine.report_head`).
    """

    cell: Cell
    run: Run
    head: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """From which `from_json` makes it again."""
        return {"cell": asdict(self.cell), "head": dict(self.head), "run": asdict(self.run)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Measured":
        """The run that `to_json` told."""
        return cls(Cell(**told["cell"]), Run.from_json(told["run"]), told["head"])


@dataclass(frozen=True)
class Row:
    """The runs of a cell."""

    cell: Cell
    runs: tuple[Run, ...]
    static: tuple[Run, ...]
    """The same queries in static batches of the same size; empty where that was not measured."""

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def spread(self) -> float:
        """Most less least seconds, beside the median."""
        times = [run.seconds for run in self.runs]
        return (max(times) - min(times)) / self.seconds

    @property
    def gain(self) -> float | None:
        """How many times faster than the static batch."""
        return statistics.median(run.seconds for run in self.static) / self.seconds if self.static else None

    @property
    def pass_gain(self) -> float | None:
        """How many times fewer passes of the batch than static: the gain if all passes took the same time.

        None where static was not measured, and for the paged engine, whose steps mix prompts and answers.
        """
        if not self.static or not self.first.tally:
            return None
        return self.static[0].tally["passes"] / self.first.tally["passes"]

    @property
    def most_pass_gain(self) -> float | None:
        """The same if every row of every pass were of use: no order of the queries lets a mode pass it."""
        if not self.static:
            return None
        # An answer's first token comes with the prompt.
        tokens = self.first.answer_tokens - len(self.first.digests)
        return self.static[0].tally["passes"] * self.cell.batch / tokens if tokens else None

    @property
    def differing(self) -> int | None:
        """Answers whose tokens are not those of the static batch."""
        if not self.static:
            return None
        return sum(a != b for a, b in zip(self.first.digests, self.static[0].digests, strict=True))

    @property
    def first(self) -> Run:
        """Everything but time is the same in every run."""
        return self.runs[0]

    def to_json(self) -> dict[str, Any]:
        """What tables show, by name."""
        derived = ("seconds", "spread", "gain", "pass_gain", "most_pass_gain", "differing")
        told: dict[str, Any] = asdict(self.cell) | {"runs": len(self.runs)}
        told |= {name: getattr(self, name) for name in derived}
        of_run = ("idle_share", "column_share", "kv_bytes_peak", "tally")
        return told | {name: getattr(self.first, name) for name in of_run}


def read_rows(measured: Sequence[Measured]) -> list[Row]:
    """A row for each cell, sets and batch sizes together, modes in the order in which they were measured."""
    runs: dict[Cell, list[Run]] = {}
    for each in measured:
        runs.setdefault(each.cell, []).append(each.run)
    cells = sorted(runs, key=lambda cell: (cell.query_set, cell.batch))
    return [
        Row(cell, tuple(runs[cell]), tuple(runs.get(Cell(cell.query_set, STATIC, cell.batch), ())))
        for cell in cells
    ]


def find(rows: Sequence[Row], query_set: str, mode: str, batch: int) -> Row | None:
    """The row of that cell, if it was measured."""
    wanted = Cell(query_set, mode, batch)
    return next((row for row in rows if row.cell == wanted), None)
