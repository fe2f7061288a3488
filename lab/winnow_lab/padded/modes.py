"""Choice of what the padded engine computes next: the paper's modes (5.1), and groups of similar length (4.2).

`Embedding` is the mode to use; the others are those that the paper compares with.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from winnow.engine.requests.request import Sequence

if TYPE_CHECKING:
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


class Mode(ABC):
    """Decision on what is computed next.

    Attributes:
        keeps_rows: keep computing the row of a finished query, idle, until all of the batch are finished.
        prefills_first: hold prefilled groups in host memory until a batch is complete, instead of embedding each.
        keeps_gaps: keep the padding that running queries get while another is prefilled in the batch's own pass.
    """

    keeps_rows = False
    prefills_first = False
    keeps_gaps = False

    @abstractmethod
    def next(self, state: "BatchState") -> Step:
        """The next step, given at least one unfinished query."""


class Embedding(Mode):
    """BATON-PD: prefill queries apart and embed their KVs into the batch, so that no other query is padded (4.2)."""

    def next(self, state: "BatchState") -> Step:
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
            """Whether one query will get a row at once; there must be host memory for the others."""
            parked_bytes = (rows - 1) * columns * budget.kv_shape.nbytes
            return state.admits(columns, budget.nbytes(rows, columns)) and parked_bytes <= queue.free_bytes

        return Prefill(state.grouping.choose(queue.waiting, fits))


def fits_alone(state: "BatchState") -> Callable[[int, int], bool]:
    """A test of whether a group of (rows, columns) fits while the batch is empty."""
    return lambda rows, columns: rows <= state.max_rows and state.budget.admits(rows, columns)


class Static(Mode):
    """Mode that runs batches to completion, like transformers' `generate`, but returns each answer as it finishes."""

    keeps_rows = True

    def next(self, state: "BatchState") -> Step:
        if state.batch.running:
            return Decode()
        state.embed_parked()
        if state.batch.running:
            return Decode()
        return Prefill(_first_that_fit(state))


class PrefillDecode(Mode):
    """Mode that prefills queries in groups of similar length, then runs batches of them to completion."""

    keeps_rows = True
    prefills_first = True

    def next(self, state: "BatchState") -> Step:
        queue = state.queue
        if state.batch.running:
            return Decode()
        urgent = state.urgent is not None
        if queue.waiting and (urgent or len(queue.parked) < state.max_rows):
            group = state.grouping.choose(queue.waiting, fits_alone(state))
            tokens = sum(sequence.num_tokens for sequence in group)
            if urgent or state.budget.kv_shape.nbytes * tokens <= queue.free_bytes:
                return Prefill(group)
        state.embed_parked()
        return Decode()


class Shaping(Mode):
    """BATON: prefill a joining query in the batch's own pass, in which the others are padded (4.1)."""

    def next(self, state: "BatchState") -> Step:
        state.embed_parked()
        batch = state.batch
        urgent = state.urgent
        if urgent is None:
            return Decode()
        if not batch.running:
            return Prefill(_first_that_fit(state))
        if not state.make_way(urgent, urgent.num_tokens):
            return Decode()
        if not batch.running or urgent.request.wants_prompt_logprobs:
            return Prefill([urgent])
        return Decode(tuple(self._joiners(state)))

    def _joiners(self, state: "BatchState") -> Iterator[Sequence]:
        rows, width, columns = len(state.batch.rows), 0, state.batch.columns
        for sequence in state.queue.waiting:
            rows, width = rows + 1, max(width, sequence.num_tokens)
            allowed = state.max_columns is None or columns + width <= state.max_columns
            fits = allowed and state.budget.admits(rows, max(columns, width) + width)
            if rows > state.max_rows or not fits or sequence.request.wants_prompt_logprobs:
                return
            yield sequence


class ShapingWithGaps(Shaping):
    """Shaping as in the paper (4.1): each joining query leaves its width of padding in the other rows.

    Later passes attend to the padding, masked, until the row ends; embedding (4.2) avoids that. The gaps lie before a
    row's tokens instead of between them, which costs the same number of columns.
    """

    keeps_gaps = True


def _first_that_fit(state: "BatchState") -> list[Sequence]:
    """As many of the first waiting queries as fit into one batch."""
    group: list[Sequence] = []
    width = 0
    for sequence in state.queue.waiting:
        width = max(width, sequence.num_tokens)
        if group and (len(group) == state.max_rows or not state.budget.admits(len(group) + 1, width)):
            break
        group.append(sequence)
        if sequence.request.wants_prompt_logprobs:
            break
    return group


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "embedding": Embedding(),
        "static": Static(),
        "pd": PrefillDecode(),
        "shaping": Shaping(),
        "shaping-gaps": ShapingWithGaps(),
    }
)
