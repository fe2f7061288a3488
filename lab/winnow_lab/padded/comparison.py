"""The modes that the paper compares with (5.1). Imported only where the option `padded_mode` names one of them."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from winnow.engine.requests.request import Sequence
from winnow_lab.padded.batch_state import BatchState
from winnow_lab.padded.modes import Decode, Mode, Prefill, Step, fits_alone


class Static:
    """Mode that runs batches to completion, like transformers' `generate`, but returns each answer as it finishes."""

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
    """Mode that prefills queries in groups of similar length, then runs batches of them to completion."""

    keeps_rows = True
    prefills_first = True
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
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


class Shaping:
    """BATON: prefill a joining query in the batch's own pass, in which the others are padded (4.1)."""

    keeps_rows = False
    prefills_first = False
    keeps_gaps = False

    def next(self, state: BatchState) -> Step:
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

    def _joiners(self, state: BatchState) -> Iterator[Sequence]:
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
    """Shaping as in the paper (4.1): each joining query leaves its width of padding in the other rows.

    Later passes attend to the padding, masked, until the row ends; embedding (4.2) avoids that. The gaps lie before a
    row's tokens instead of between them, which costs the same number of columns.
    """

    keeps_gaps = True


def _first_that_fit(state: BatchState) -> list[Sequence]:
    """Return as many of the first waiting queries as fit into one batch."""
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
        "shaping-gaps": ShapingWithGaps(),
    }
)
