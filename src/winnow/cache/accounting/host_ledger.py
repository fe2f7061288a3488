"""The accounting of the host tier: which copies of sequences lie in host memory, and their bytes."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from winnow.cache.layout import CacheLayout, IntArray


class OutOfHostMemoryError(RuntimeError):
    """A copy would exceed the host tier's limit. The scheduler asks first, so a user never sees this."""


class HostTierError(RuntimeError):
    """Copies to or from host memory that were not made; all else of their update was done."""

    def __init__(self, host_ids: Iterable[int], reason: str) -> None:
        self.host_ids, self._reason = frozenset(host_ids), reason
        super().__init__(f"copies {sorted(self.host_ids)} to or from host memory failed: {reason}")

    def __reduce__(self) -> tuple[type[Self], tuple[frozenset[int], str]]:
        return type(self), (self.host_ids, self._reason)


class HostCopy(NamedTuple):
    """A sequence in host memory."""

    lengths: IntArray  # KVs of its rows, int32 [layers, heads]
    num_blocks: int
    nbytes: int  # of the blocks, and of what else is kept of the sequence


class HostLedger:
    """Copies of sequences in host memory, `limit` bytes at most (0: no host tier), by ids that are never used twice."""

    def __init__(self, layout: CacheLayout, limit: int) -> None:
        self.limit = limit
        self.copies: dict[int, HostCopy] = {}
        self.used_bytes = self.peak_bytes = 0
        self._layout = layout
        self._next_id = 0

    def nbytes(self, lengths: IntArray, state_bytes: int = 0) -> int:
        """Return the bytes of a copy of rows of `lengths` KVs, [layers, heads], with those of states."""
        return self._layout.host_bytes(self._layout.by_kind(self._layout.row_blocks(lengths))) + state_bytes

    def has_room_for(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.limit

    def put(self, lengths: IntArray, state_bytes: int = 0) -> int:
        """Enter a copy. Returns its id. Raises OutOfHostMemoryError: there is no room; nothing has changed."""
        nbytes = self.nbytes(lengths, state_bytes)
        if not self.has_room_for(nbytes):
            raise OutOfHostMemoryError(f"{nbytes} bytes asked for, {self.used_bytes} of {self.limit} in use")
        host_id, self._next_id = self._next_id, self._next_id + 1
        self.copies[host_id] = HostCopy(lengths, int(self._layout.row_blocks(lengths).sum()), nbytes)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return host_id

    def discard(self, host_id: int) -> None:
        self.used_bytes -= self.copies.pop(host_id).nbytes

    def check_integrity(self) -> None:
        held = sum(copy.nbytes for copy in self.copies.values())
        assert self.used_bytes == held, "host bytes are miscounted"
        assert self.used_bytes <= self.limit, "the host tier holds more than its limit"
