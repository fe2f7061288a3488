"""State of a sequence in the cache."""

from dataclasses import dataclass, replace

EARLIER_ROUND = -1
"""`KVState.last_round` of KVs that an earlier round left, which its own policy has yet to compress once more."""


@dataclass
class KVState:
    """State of a sequence in the cache, all of it. Forking, preempting and ending a sequence act on this object.

    Nothing of it is kept elsewhere.

    Attributes:
        slot: in the ledger; None: nothing is in the cache.
        host_id: of its copy in host memory, while it waits; it has no slot then, and the other fields say what the copy
            holds.
        num_computed: tokens of the sequence that are computed.
        last_round: their number at the last round of eviction; 0: there was none; or `EARLIER_ROUND`.
        num_rounds: how many rounds these KVs have seen.
        passes_done: passes of the replay that were computed and dropped.
        replayed: tokens of the next pass that are in the cache, behind the context.
        last_served: sequences that had been in rounds before its last one; -1: there was none since it got its slot.
    """

    slot: int | None = None
    num_computed: int = 0
    last_round: int = 0
    num_rounds: int = 0
    passes_done: int = 0
    replayed: int = 0
    host_id: int | None = None
    last_served: int = -1

    @property
    def running_slot(self) -> int:
        """Slot of a running sequence."""
        assert self.slot is not None, "only a running sequence has a slot"
        return self.slot

    def fork(self, slot: int) -> "KVState":
        """Return the same KVs, held by another slot."""
        return replace(self, slot=slot, last_served=-1)
