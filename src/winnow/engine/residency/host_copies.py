"""Sequences in host memory, copied there and back between steps."""

from collections.abc import Callable

from winnow.cache import HostTierError, Ledger
from winnow.engine.executor import Executor
from winnow.engine.residency.preemption_costs import PreemptionCosts


class HostCopies:
    """Copies of running sequences in the host tier. A copy that fails is not there; other sequences are unaffected.

    Every copy is made before the method returns, and its time is recorded.
    """

    def __init__(
        self, executor: Executor, ledger: Ledger, clock: Callable[[], float], costs: PreemptionCosts
    ) -> None:
        self._executor = executor
        self._ledger = ledger
        self._clock = clock
        self._costs = costs

    def nbytes(self, slot: int) -> int:
        """Return bytes that a copy of a sequence takes."""
        return self._ledger.host.nbytes(self._ledger.lengths[slot], self._executor.state_bytes(slot))

    def save(self, slot: int) -> int | None:
        """Copy a sequence, which stays as it is. Returns the copy's id; None: the system lacks memory.

        The caller has checked `HostLedger.has_room_for`.
        """
        self._executor.apply(self._ledger.take_update())
        host_id = self._ledger.save(slot, self._executor.state_bytes(slot))
        try:
            self._apply(self._ledger.host.copies[host_id].nbytes, back=False)
        except HostTierError:
            self._ledger.discard(host_id)
            return None
        except BaseException:
            self._ledger.discard(host_id)
            raise
        return host_id

    def load(self, host_id: int) -> int | None:
        """Copy a sequence back to a slot of its own; the copy stays. Returns the slot; None: copying failed.

        The caller has checked that there are a free slot and room for `Ledger.demand_of`.
        """
        self._executor.apply(self._ledger.take_update())
        slot = self._ledger.open()
        try:
            self._ledger.load(host_id, slot)
            self._apply(self._ledger.host.copies[host_id].nbytes, back=True)
        except HostTierError:
            self._ledger.close(slot)
            return None
        except BaseException:
            self._ledger.close(slot)
            raise
        return slot

    def _apply(self, nbytes: int, *, back: bool) -> None:
        start = self._clock()
        self._executor.apply(self._ledger.take_update())
        self._costs.record_copy(nbytes, self._clock() - start, back=back)
