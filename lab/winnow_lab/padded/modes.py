"""Choice of what the padded engine computes next. `comparison` has the modes that this one is measured against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from winnow.engine.requests.request import Sequence
from winnow_lab.padded.batch_state import BatchState


@dataclass(frozen=True)
class Prefill:
    """Prefill of a group apart from the batch."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class Decode:
    """One pass of the batch; `joiners` are prefilled in it."""

    joiners: tuple[Sequence, ...] = ()


Step = Prefill | Decode


class Mode(Protocol):
    """Decision on what is computed next.

    Attributes:
        keeps_rows: keep computing the row of a finished query, idle, until all of the batch are finished.
        prefills_first: hold prefilled groups in host memory until a batch is complete, instead of embedding each.
        keeps_gaps: keep the padding that running queries get while another is prefilled in the batch's own pass.
    """

    keeps_rows: bool
    prefills_first: bool
    keeps_gaps: bool

    def next(self, state: BatchState) -> Step:
        """Return the next step, given at least one unfinished query."""


class Embedding:
    """BATON-PD: prefill queries apart and embed their KVs into the batch, so that no other query is padded (4.2)."""

    keeps_rows = False
    prefills_first = False
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
        state.embed_parked()
        queue, batch, budget = state.queue, state.batch, state.budget
        urgent = state.urgent
        if urgent is None:
            return Decode()
        if not batch.running:
            return Prefill(state.grouping.choose(queue.waiting, fits_alone(state)))
        alone = budget.nbytes(1, urgent.num_tokens)
        if not state.make_way(urgent, urgent.num_tokens, alone):
            return Decode()
        if not batch.running:
            return Prefill([urgent])

        def fits(rows: int, columns: int) -> bool:
            """Return whether one query will get a row at once; there must be host memory for the others."""
            parked_bytes = (rows - 1) * columns * budget.kv_shape.nbytes
            return state.admits(columns, budget.nbytes(rows, columns)) and parked_bytes <= queue.free_bytes

        return Prefill(state.grouping.choose(queue.waiting, fits))


def fits_alone(state: BatchState) -> Callable[[int, int], bool]:
    """Return a test of whether a group of (rows, columns) fits while the batch is empty."""
    return lambda rows, columns: rows <= state.max_rows and state.budget.admits(rows, columns)
