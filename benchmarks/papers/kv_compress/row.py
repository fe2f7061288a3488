"""What the runs of a cell mean beside the full cache and beside prefill alone."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.kv_compress.grid import Cell
from benchmarks.papers.kv_compress.run import Run
from benchmarks.papers.kv_compress.study import Study


@dataclass(frozen=True)
class Row:
    """A cell beside those that it is compared with.

    Times are compared within one turn through all cells, in which a slow machine slowed all of them; of the turns the
    median counts.
    """

    cell: Cell
    runs: tuple[Run, ...]
    full: tuple[Run, ...]
    prefill: tuple[Run, ...]
    """The same prompts with one new token each, no eviction."""
    own_prefill: tuple[Run, ...] = ()
    """The same under this cell's policy and compression, where that was measured."""

    @property
    def gain(self) -> float:
        """Total tokens per second beside the full cache's."""
        return self._median(self.full, self.runs)

    @property
    def bound(self) -> float:
        """The gain if decoding took no time: of the full cache's time only prefill's is left.

        Compression after the prompt cannot pass it. Rounds within the prompt can: they shorten attention there too.
        """
        return self._median(self.full, self.prefill)

    @property
    def share(self) -> float:
        """Of the bound."""
        return self._median(self.prefill, self.runs)

    @property
    def own_bound(self) -> float | None:
        """The bound with prefill as fast as it is under this policy; None where that was not measured."""
        return self._median(self.full, self.own_prefill) if self.own_prefill else None

    @property
    def first(self) -> Run:
        """Batches, rounds and answers are the same in every run."""
        return self.runs[0]

    @property
    def rates(self) -> tuple[float, float, float]:
        """Total tokens per second: median, least, most."""
        rates = [run.total_rate for run in self.runs]
        return statistics.median(rates), min(rates), max(rates)

    @staticmethod
    def _median(before: tuple[Run, ...], after: tuple[Run, ...]) -> float:
        return statistics.median(
            one.seconds / other.seconds for one, other in zip(before, after, strict=False)
        )

    def to_json(self) -> dict[str, Any]:
        """What tables show, by name."""
        median, least, most = self.rates
        told: dict[str, Any] = {
            "context": self.cell.context,
            "preset": self.cell.preset,
            "compression": self.cell.compression,
            "runs": len(self.runs),
            "total_rate": median,
            "total_rate_least": least,
            "total_rate_most": most,
        }
        for name in ("gain", "bound", "share", "own_bound"):
            told[name] = getattr(self, name)
        for name in (
            "reached",
            "mean_batch",
            "most_batch",
            "preemptions",
            "rounds",
            "kv_bytes_peak",
            "accuracy",
        ):
            told[name] = getattr(self.first, name)
        return told


def read_rows(study: Study) -> list[Row]:
    """The cells that were measured with all that they are compared with, by context, compression and policy."""
    return list(_rows(study))


def _rows(study: Study) -> Iterator[Row]:
    def runs(cell: Cell) -> tuple[Run, ...]:
        return tuple(study.runs.get(cell, ()))

    for context in study.grid.contexts:
        full, prefill = runs(Cell(context)), runs(Cell(context, prefill_only=True))
        if not full or not prefill:
            continue
        yield Row(Cell(context), full, full, prefill)
        for cell in study.grid.compressed(context):
            own = runs(Cell(context, cell.preset, cell.compression, prefill_only=True))
            if found := runs(cell):
                yield Row(cell, found, full, prefill, own if cell.preset == study.grid.p_and_d else ())
