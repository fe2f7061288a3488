"""Queries that have no row: those not yet prefilled, and those whose KVs wait outside the batch."""

from bisect import insort
from itertools import count

from winnow.engine.request import Sequence
from winnow.padded.cache import QueryKVs


class Queue:
    """First come, first served, among those of equal priority.

    Attributes:
        waiting: without KVs; in the order in which they are served.
        parked: with KVs: prefilled before there was a row for them, or taken out of the batch. In order.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self._kvs: dict[Sequence, QueryKVs] = {}
        self._loose: set[Sequence] = set()
        self._arrivals: dict[Sequence, int] = {}
        self._clock = count()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.parked)

    @property
    def loose(self) -> list[Sequence]:
        """Parked sequences whose KVs still lie in a cache."""
        return list(self._loose)

    @property
    def stowed(self) -> list[Sequence]:
        """Parked sequences whose KVs are in host memory."""
        return [sequence for sequence in self.parked if sequence not in self._loose]

    @property
    def stowed_bytes(self) -> int:
        """Of those KVs; samples that share a prompt's count once."""
        return sum({id(self._kvs[each]): self._kvs[each].nbytes for each in self.stowed}.values())

    def add(self, sequence: Sequence) -> None:
        """Let a sequence without KVs wait. One that comes back takes its old place."""
        self._arrivals.setdefault(sequence, next(self._clock))
        insort(self.waiting, sequence, key=self._order)

    def park(self, sequence: Sequence, kvs: QueryKVs, *, loose: bool = False) -> None:
        """Keep a sequence with its KVs until there is a row for it; `loose` KVs lie in a cache, see `stow`."""
        if loose:
            self._loose.add(sequence)
        self._arrivals.setdefault(sequence, next(self._clock))
        self._kvs[sequence] = kvs
        insort(self.parked, sequence, key=self._order)

    def take(self, sequence: Sequence) -> QueryKVs | None:
        """Take a sequence out. Returns its KVs, or None where it was waiting without."""
        kvs = self._kvs.pop(sequence, None)
        self._loose.discard(sequence)
        (self.waiting if kvs is None else self.parked).remove(sequence)
        return kvs

    def stow(self) -> None:
        """Copy KVs that still lie in a cache to host memory, samples that share them together."""
        copies: dict[int, QueryKVs] = {}
        for sequence in self._loose:
            kvs = self._kvs[sequence]
            if id(kvs) not in copies:
                copies[id(kvs)] = kvs.on_host()
            self._kvs[sequence] = copies[id(kvs)]
        self._loose.clear()

    def length_parked(self, sequence: Sequence) -> int:
        """KVs of a parked sequence."""
        return self._kvs[sequence].length

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was."""
        self._arrivals.pop(sequence, None)

    def least(self, sequences: list[Sequence]) -> Sequence:
        """Who gives way: the lowest priority, and among equals the one that came last."""
        return max(sequences, key=self._order)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._kvs or sequence in self.waiting

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return -sequence.request.priority, self._arrivals[sequence]
