"""Queues of sequences that wait for a slot."""

from bisect import insort
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from winnow.engine.request import Request, Sequence


class WaitingQueue(Protocol):
    """Sequences that wait for a slot, in the order in which they are served. Both engines wait in one."""

    def add(self, request: Request) -> None:
        """Queue the first sample of a request that has just arrived."""

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence of an earlier request: one that was preempted, or another sample."""

    @property
    def first(self) -> Sequence | None:
        """The sequence that is served next; None: the queue is empty."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a slot or has ended. No effect if it is not in the queue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class PriorityQueue:
    """Serves the greater priority first, ties first come, first served.

    A preempted sequence, and a sample that starts later than its siblings, takes the place of its request.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._arrivals = count()

    def add(self, request: Request) -> None:
        request.arrival = next(self._arrivals)
        self.put_back(request.sequences[0])

    def put_back(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=serving_order)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)


def serving_order(sequence: Sequence) -> tuple[int, int, int]:
    """Return a sort key: the smaller is served first."""
    request = sequence.request
    return -request.priority, request.arrival, sequence.index
