"""Queries that have no row: those not yet prefilled, and those whose KVs wait outside the batch."""

from bisect import insort
from collections.abc import Sequence as SequenceType

from winnow.engine.queue import PriorityQueue, WaitingQueue, serving_order
from winnow.engine.request import Sequence
from winnow.padded.cache import QueryKVs
from winnow.padded.counters import Counters


class Queue:
    """Serves who waits and who is parked in `serving_order`.

    Args:
        park_memory: bytes of host memory that KVs may take. What does not fit is dropped and computed again.

    Attributes:
        waiting: without KVs.
        parked: with KVs: prefilled before there was a row for them, or taken out of the batch. In order.
    """

    def __init__(self, park_memory: int, counters: Counters) -> None:
        self.waiting: WaitingQueue = PriorityQueue()
        self.parked: list[Sequence] = []
        self.park_memory = park_memory
        self._counters = counters
        self._kvs: dict[Sequence, QueryKVs] = {}
        self._on_device: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.parked)

    # -- what is parked --------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> list[Sequence]:
        """Parked sequences whose KVs still lie in a cache, in order."""
        return [sequence for sequence in self.parked if sequence in self._on_device]

    @property
    def on_device_bytes(self) -> int:
        """Of those KVs; samples that share a prompt's count once."""
        return self._nbytes(self.on_device)

    @property
    def offloaded(self) -> list[Sequence]:
        """Parked sequences whose KVs are in host memory, in order."""
        return [sequence for sequence in self.parked if sequence not in self._on_device]

    @property
    def offloaded_bytes(self) -> int:
        """Of those KVs, counted likewise."""
        return self._nbytes(self.offloaded)

    @property
    def free_bytes(self) -> int:
        """Host memory that is left."""
        return self.park_memory - self.offloaded_bytes

    def length_parked(self, sequence: Sequence) -> int:
        """KVs of a parked sequence."""
        return self._kvs[sequence].length

    # -- in and out ------------------------------------------------------------------------------------------------

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence of a request that came before, without KVs: all its tokens are to be computed."""
        sequence.kv.num_computed = 0
        self.waiting.put_back(sequence)

    def hold(self, sequence: Sequence, kvs: QueryKVs) -> None:
        """Keep a sequence whose KVs lie in a cache, until it is taken or they are offloaded."""
        self._on_device.add(sequence)
        self._keep(sequence, kvs)

    def offload(self) -> None:
        """Park those whose KVs still lie in a cache, samples that share them together."""
        sharing: dict[int, list[Sequence]] = {}
        for sequence in self.on_device:
            sharing.setdefault(id(self._kvs[sequence]), []).append(sequence)
        for sequences in sharing.values():
            kvs = self._kvs[sequences[0]]
            for sequence in sequences:
                self.pop(sequence)
            self.park(sequences, kvs)

    def park(self, sequences: SequenceType[Sequence], kvs: QueryKVs) -> None:
        """Keep sequences that share KVs until there are rows for them: with a copy in host memory, if it has room."""
        if kvs.nbytes <= self.free_bytes:
            copy = kvs.on_host()
            for sequence in sequences:
                self._keep(sequence, copy)
        else:
            self._counters.drops += len(sequences)
            for sequence in sequences:
                self.put_back(sequence)

    def pop(self, sequence: Sequence) -> QueryKVs | None:
        """Take a sequence out. Returns its KVs, or None where it was waiting without."""
        kvs = self._kvs.pop(sequence, None)
        self._on_device.discard(sequence)
        (self.waiting if kvs is None else self.parked).remove(sequence)
        return kvs

    def choose_victim(self, sequences: SequenceType[Sequence]) -> Sequence:
        """Return the sequence that is served last of all: the one to park."""
        return max(sequences, key=serving_order)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._kvs or sequence in self.waiting

    # -- inside ----------------------------------------------------------------------------------------------------

    def _nbytes(self, parked: SequenceType[Sequence]) -> int:
        kvs = {id(self._kvs[sequence]): self._kvs[sequence] for sequence in parked}
        return sum(each.nbytes for each in kvs.values())

    def _keep(self, sequence: Sequence, kvs: QueryKVs) -> None:
        self._kvs[sequence] = kvs
        insort(self.parked, sequence, key=serving_order)
