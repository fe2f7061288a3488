"""Who is served next: sequences without a slot."""

from bisect import insort
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from winnow.engine.request import Request, Sequence


class WaitingQueue(Protocol):
    """Sequences that wait for a slot, in the order in which they are served."""

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived: its first sample."""

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence of a request that came before: one that was preempted, or another sample."""

    @property
    def first(self) -> Sequence | None:
        """Who is served next; None: nobody waits."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence gets a slot, or has ended. No effect if it does not wait."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class PriorityQueue:
    """The greater priority first; among equals first come, first served. Who comes back takes its old place."""

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
    """The smaller is served first."""
    request = sequence.request
    return -request.priority, request.arrival, sequence.index
