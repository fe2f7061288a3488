"""Queries without a row: waiting without KVs, or parked with KVs outside the batch."""

from bisect import insort
from collections.abc import Callable, Sequence as SequenceType

from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.queue import Order, WaitingQueue
from winnow_lab.padded.cache import QueryKVs
from winnow_lab.padded.stats import Counters

Fetch = Callable[[QueryKVs], Callable[[], QueryKVs]]
"""Starts to copy KVs from host memory to the device; what it returns gives the copy, to be read at once."""


class Queue:
    """The waiting queue, and parked queries in the order of `order`, tenants aside.

    Args:
        park_memory: maximum bytes of host memory for KVs. KVs that do not fit are dropped and computed again.
        order: who is served first; left out: the greater priority.
        fetch: None: the device computes with host memory.

    Attributes:
        waiting: sequences without KVs.
        parked: sequences with KVs: prefilled before there was a row for them, or removed from the batch.
    """

    def __init__(
        self, park_memory: int, counters: Counters, order: Order | None = None, fetch: Fetch | None = None
    ) -> None:
        self.waiting = WaitingQueue(order)
        self.parked: list[Sequence] = []
        self.park_memory = park_memory
        self._counters = counters
        self._kvs: dict[Sequence, QueryKVs] = {}
        self._on_device: set[Sequence] = set()
        self._fetch = fetch
        self._fetched: tuple[Sequence, Callable[[], QueryKVs]] | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.parked)

    # -- parked queries --------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> list[Sequence]:
        """Parked sequences whose KVs are still in a cache on the device, in order."""
        return [sequence for sequence in self.parked if sequence in self._on_device]

    @property
    def offloaded(self) -> list[Sequence]:
        """Parked sequences whose KVs are in host memory, in order."""
        return [sequence for sequence in self.parked if sequence not in self._on_device]

    @property
    def free_bytes(self) -> int:
        return self.park_memory - self.nbytes(self.offloaded)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the device that `fetch` has taken."""
        return 0 if self._fetched is None else self._kvs[self._fetched[0]].nbytes

    def length_parked(self, sequence: Sequence) -> int:
        return self._kvs[sequence].length

    # -- in and out ------------------------------------------------------------------------------------------------

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence of an earlier request, without KVs: all its tokens are to be computed."""
        sequence.kv.num_computed = 0
        self.waiting.requeue(sequence)

    def hold(self, sequence: Sequence, kvs: QueryKVs) -> None:
        """Park a sequence whose KVs stay in a cache on the device until `pop` or `offload`."""
        self._on_device.add(sequence)
        self._keep(sequence, kvs)

    def offload(self) -> None:
        """Copy the KVs that are on the device to host memory; shared ones once."""
        sharing: dict[int, list[Sequence]] = {}
        for sequence in self.on_device:
            sharing.setdefault(id(self._kvs[sequence]), []).append(sequence)
        for sequences in sharing.values():
            kvs = self._kvs[sequences[0]]
            for sequence in sequences:
                self.pop(sequence)
            self.park(sequences, kvs)

    def park(self, sequences: SequenceType[Sequence], kvs: QueryKVs) -> None:
        """Park sequences that share KVs, with a copy in host memory; without, if there is no room for it."""
        if kvs.nbytes <= self.free_bytes:
            copy = kvs.on_host()
            for sequence in sequences:
                self._keep(sequence, copy)
        else:
            self._counters.drops += len(sequences)
            for sequence in sequences:
                self.requeue(sequence)

    def fetch(self) -> None:
        """Start to copy the KVs of the first parked sequence to the device, in place of what was fetched before.

        They stay in host memory, too, until `pop`.
        """
        self.drop_fetched()
        if self._fetch is not None and self.parked and self.parked[0] not in self._on_device:
            self._fetched = self.parked[0], self._fetch(self._kvs[self.parked[0]])

    def drop_fetched(self) -> None:
        self._fetched = None

    def pop(self, sequence: Sequence) -> QueryKVs | None:
        """Remove a sequence. Returns its KVs; None: it was waiting without."""
        kvs = self._kvs.pop(sequence, None)
        if self._fetched is not None and self._fetched[0] is sequence:
            kvs, self._fetched = self._fetched[1](), None
            self._counters.fetches += 1
        self._on_device.discard(sequence)
        (self.waiting if kvs is None else self.parked).remove(sequence)
        return kvs

    def choose_victim(self, sequences: SequenceType[Sequence]) -> Sequence:
        """The sequence to park: the last one in serving order."""
        order = self.waiting.order
        return max(sequences, key=lambda s: (order.tenant_rank(s.request.tenant), order.rank(s)))

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._kvs or sequence in self.waiting

    # -- inside ----------------------------------------------------------------------------------------------------

    def nbytes(self, parked: SequenceType[Sequence]) -> int:
        """Bytes of the KVs of parked sequences; those shared by samples of a prompt count once."""
        kvs = {id(self._kvs[sequence]): self._kvs[sequence] for sequence in parked}
        return sum(each.nbytes for each in kvs.values())

    def _keep(self, sequence: Sequence, kvs: QueryKVs) -> None:
        self._kvs[sequence] = kvs
        insort(self.parked, sequence, key=self.waiting.order.rank)
