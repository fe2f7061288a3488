"""The four ways to batch that the paper compares (5.1), each deciding what the engine computes next."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from winnow.engine.request import Sequence
from winnow.padded.batch_state import BatchState


@dataclass(frozen=True)
class Prefill:
    """Prefill a group apart from the batch."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class Decode:
    """One pass of the batch; `joiners` are prefilled in it."""

    joiners: tuple[Sequence, ...] = ()


Step = Prefill | Decode


class Mode(Protocol):
    """Decides what is computed next."""

    keeps_rows: bool
    """Whether the row of a finished query stays and is computed for nobody until all are finished."""
    prefills_first: bool
    """Whether prefilled groups wait in host memory until enough are there, instead of entering the batch at once."""

    keeps_gaps: bool
    """Whether the padding that running queries get behind their token while another is prefilled is kept."""

    def next(self, state: BatchState) -> Step:
        """The next step, out of at least one unfinished query. There is always one."""


class Static:
    """Run to completion: the batch that transformers' `generate` computes, answers returned as each finishes."""

    keeps_rows = True
    prefills_first = False
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
        if state.batch.running:
            return Decode()
        state.embed_parked()
        if state.batch.running:
            return Decode()
        return Prefill(_first_that_fit(state))


class PrefillDecode:
    """Queries are prefilled in groups of similar length, then batches of them run to completion."""

    keeps_rows = True
    prefills_first = True
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
        queue = state.queue
        if state.batch.running:
            return Decode()
        if queue.waiting and (state.waiting_is_urgent or len(queue.parked) < state.max_rows):
            group = state.grouping.choose(queue.waiting, _fits_alone(state))
            tokens = sum(sequence.num_tokens for sequence in group)
            if state.waiting_is_urgent or state.budget.kv_shape.nbytes * tokens <= queue.free_bytes:
                return Prefill(group)
        state.embed_parked()
        return Decode()


class Shaping:
    """A query joins as soon as another leaves, prefilled in the batch's own pass while the others are padded (4.1)."""

    keeps_rows = False
    prefills_first = False
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
        state.embed_parked()
        queue, batch = state.queue, state.batch
        if not state.waiting_is_urgent:
            return Decode()
        if not batch.running:
            return Prefill(_first_that_fit(state))
        first = queue.waiting.first
        assert first is not None, "an urgent sequence waits"
        if not state.make_way(first, first.num_tokens):
            return Decode()
        if not batch.running or first.request.wants_prompt_logprobs:
            return Prefill([first])
        return Decode(tuple(self._joiners(state)))

    def _joiners(self, state: BatchState) -> Iterator[Sequence]:
        """The first waiting queries that find rows, and memory for the columns that their pass appends."""
        rows, width, columns = len(state.batch.rows), 0, state.batch.columns
        for sequence in state.queue.waiting:
            rows, width = rows + 1, max(width, sequence.num_tokens)
            allowed = state.max_columns is None or columns + width <= state.max_columns
            if (
                rows > state.max_rows
                or not allowed
                or not state.budget.admits(rows, max(columns, width) + width)
            ):
                return
            if sequence.request.wants_prompt_logprobs:
                return
            yield sequence


class ShapingWithGaps(Shaping):
    """Shaping as the paper has it (4.1): each query that joins leaves its width of padding in the rows of the others.

    It is attended to, masked, until its row ends, so passes grow slower with each that joins: what 4.2 is there for.
    The gaps lie before a row's tokens instead of between them, which is as many columns.
    """

    keeps_gaps = True


class Embedding:
    """A query is prefilled apart and its KVs embedded into the batch: nobody else is padded (4.2)."""

    keeps_rows = False
    prefills_first = False
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
        state.embed_parked()
        queue, batch, budget = state.queue, state.batch, state.budget
        if not state.waiting_is_urgent:
            return Decode()
        if not batch.running:
            return Prefill(state.grouping.choose(queue.waiting, _fits_alone(state)))
        oldest = queue.waiting.first
        assert oldest is not None, "an urgent sequence waits"
        alone = budget.nbytes(1, oldest.num_tokens)
        if not state.make_way(oldest, oldest.num_tokens, alone):
            return Decode()
        if not batch.running:
            return Prefill([oldest])

        def fits(rows: int, columns: int) -> bool:
            """One query is sure of its row; the others may have to be parked."""
            parked_bytes = (rows - 1) * columns * budget.kv_shape.nbytes
            return state.admits(columns, budget.nbytes(rows, columns)) and parked_bytes <= queue.free_bytes

        return Prefill(state.grouping.choose(queue.waiting, fits))


def _fits_alone(state: BatchState) -> Callable[[int, int], bool]:
    """Whether rows and columns fit while the batch is empty."""
    return lambda rows, columns: rows <= state.max_rows and state.budget.admits(rows, columns)


def _first_that_fit(state: BatchState) -> list[Sequence]:
    """As many of the oldest waiting queries as make a batch together."""
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
        "static": Static(),
        "pd": PrefillDecode(),
        "shaping": Shaping(),
        "embedding": Embedding(),
        "shaping-gaps": ShapingWithGaps(),
    }
)
