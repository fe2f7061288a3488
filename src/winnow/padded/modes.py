"""The four ways to batch that the paper compares (5.1), each deciding what the engine computes next."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from winnow.engine.request import Sequence
from winnow.padded.batch import Batch
from winnow.padded.groups import Grouping
from winnow.padded.queue import Queue
from winnow.padded.room import Room


@dataclass(frozen=True)
class Prefill:
    """Prefill a group apart from the batch."""

    sequences: list[Sequence]


@dataclass(frozen=True)
class Decode:
    """One pass of the batch; `joiners` are prefilled in it."""

    joiners: tuple[Sequence, ...] = ()


Step = Prefill | Decode


@dataclass(frozen=True)
class Situation:
    """What modes decide upon, and how they move queries."""

    queue: Queue
    batch: Batch
    room: Room
    grouping: Grouping
    max_columns: int | None
    """Columns that the model allows at most; None: any number."""
    park: Callable[[Sequence], None]
    """Take a running sequence out, its KVs to host memory."""
    embed: Callable[[Sequence], None]
    """Put a parked sequence into the batch."""

    @property
    def max_rows(self) -> int:
        return self.room.max_rows

    def admits(self, length: int, elsewhere: int = 0) -> bool:
        """Whether one more query of so many KVs may enter the batch beside others, or enter an empty one."""
        batch = self.batch
        if not batch.running:
            return True  # whatever was admitted fits alone
        rows, columns = len(batch.rows) + 1, max(batch.columns, length)
        return rows <= self.max_rows and self.room.admits(rows, columns, batch.elsewhere + elsewhere)

    def make_way(self, sequence: Sequence, length: int, elsewhere: int = 0) -> bool:
        """Park queries of lower priority until `sequence` may enter. False: there are none, or not enough."""
        while not self.admits(length, elsewhere):
            least = self.queue.least(self.batch.running)
            if least.request.priority >= sequence.request.priority:
                return False
            self.park(least)
            self.batch.release_front()
        return True

    @property
    def waiting_is_urgent(self) -> bool:
        """Whether the first waiting query comes before all that are parked."""
        waiting, parked = self.queue.waiting, self.queue.parked
        return bool(waiting) and (not parked or waiting[0].request.priority > parked[0].request.priority)

    def embed_parked(self) -> None:
        """Put parked queries into the batch, as far as there is room, unless a more urgent one waits."""
        queue = self.queue
        while queue.parked:
            first = queue.parked[0]
            if self.waiting_is_urgent:
                return
            if not self.make_way(first, queue.length_parked(first)):
                return
            self.embed(first)


class Mode(Protocol):
    """Decides what is computed next."""

    keeps_rows: bool
    """Whether the row of a finished query stays and is computed for nobody until all are finished."""
    prefills_first: bool
    """Whether prefilled groups wait apart until enough of them are there, instead of entering the batch at once."""

    def next(self, now: Situation) -> Step:
        """The next step, out of at least one unfinished query. There is always one."""


class Static:
    """Run to completion: the batch that transformers' `generate` computes, answers returned as each finishes."""

    keeps_rows = True
    prefills_first = False

    def next(self, now: Situation) -> Step:
        if now.batch.running:
            return Decode()
        now.embed_parked()
        if now.batch.running:
            return Decode()
        return Prefill(_first_that_fit(now))


class PrefillDecode:
    """Queries are prefilled in groups of similar length, then batches of them run to completion."""

    keeps_rows = True
    prefills_first = True

    def next(self, now: Situation) -> Step:
        if now.batch.running:
            return Decode()
        if now.waiting_is_urgent or (now.queue.waiting and len(now.queue.parked) < now.max_rows):
            return Prefill(now.grouping.choose(now.queue.waiting, _fits_alone(now)))
        now.embed_parked()
        return Decode()


class Shaping:
    """A query joins as soon as another leaves, prefilled in the batch's own pass while the others are padded (4.1)."""

    keeps_rows = False
    prefills_first = False

    def next(self, now: Situation) -> Step:
        now.embed_parked()
        queue, batch = now.queue, now.batch
        if not now.waiting_is_urgent:
            return Decode()
        if not batch.running:
            return Prefill(_first_that_fit(now))
        first = queue.waiting[0]
        if not now.make_way(first, first.num_tokens):
            return Decode()
        if not batch.running or first.request.wants_prompt_logprobs:
            return Prefill([first])
        return Decode(tuple(self._joiners(now)))

    def _joiners(self, now: Situation) -> Iterator[Sequence]:
        """The first waiting queries that find rows, and memory for the columns that their pass appends."""
        rows, width, columns = len(now.batch.rows), 0, now.batch.columns
        for sequence in now.queue.waiting:
            rows, width = rows + 1, max(width, sequence.num_tokens)
            allowed = now.max_columns is None or columns + width <= now.max_columns
            if rows > now.max_rows or not allowed or not now.room.admits(rows, max(columns, width) + width):
                return
            if sequence.request.wants_prompt_logprobs:
                return
            yield sequence


class Embedding:
    """A query is prefilled apart and its KVs embedded into the batch: nobody else is padded (4.2)."""

    keeps_rows = False
    prefills_first = False

    def next(self, now: Situation) -> Step:
        now.embed_parked()
        queue, batch, room = now.queue, now.batch, now.room
        if not now.waiting_is_urgent:
            return Decode()
        if not batch.running:
            return Prefill(now.grouping.choose(queue.waiting, _fits_alone(now)))
        oldest = queue.waiting[0]
        alone = room.nbytes(1, oldest.num_tokens)
        if not now.make_way(oldest, oldest.num_tokens, alone):
            return Decode()
        if not batch.running:
            return Prefill([oldest])

        def fits(rows: int, columns: int) -> bool:
            return now.admits(columns, room.nbytes(rows, columns))

        return Prefill(now.grouping.choose(queue.waiting, fits))


def _fits_alone(now: Situation) -> Callable[[int, int], bool]:
    """Whether rows and columns fit while the batch is empty."""
    return lambda rows, columns: rows <= now.max_rows and now.room.admits(rows, columns)


def _first_that_fit(now: Situation) -> list[Sequence]:
    """As many of the oldest waiting queries as make a batch together."""
    group: list[Sequence] = []
    width = 0
    for sequence in now.queue.waiting:
        width = max(width, sequence.num_tokens)
        if group and (len(group) == now.max_rows or not now.room.admits(len(group) + 1, width)):
            break
        group.append(sequence)
        if sequence.request.wants_prompt_logprobs:
            break
    return group


MODES: Mapping[str, Mode] = MappingProxyType(
    {"static": Static(), "pd": PrefillDecode(), "shaping": Shaping(), "embedding": Embedding()}
)
