"""WHO must have its blocks for itself before a step changes them."""

import sys

from winnow.cache import Ledger
from winnow.engine.requests.request import Sequence
from winnow.engine.residency.prefixes import PrefixSharing
from winnow.engine.residency.running import Running


class BlockOwnership:
    """Copies for running sequences of blocks that others hold too.

    Args:
        chunk: most tokens that a step computes of a prompt; None: any number.
    """

    def __init__(
        self,
        ledger: Ledger,
        prefixes: PrefixSharing,
        running: Running,
        chunk: int | None,
    ) -> None:
        self._ledger = ledger
        self._prefixes = prefixes
        self._running = running
        self._chunk = sys.maxsize if chunk is None else chunk

    def own(self, sequence: Sequence) -> bool:
        """Make a running sequence the only holder of its blocks.

        While memory lacks, since others hold shared blocks, sequences give way, as where decoding finds no room: who is
        served first continues. False: the sequence itself gave way.
        """
        slot = sequence.kv.running_slot
        while self._ledger.is_shared(slot) and not self._ledger.own_or_forget(slot):
            self._running.preempt()
            if sequence.kv.slot is None:
                return False
        return True

    def unshare_samples(self, *, budgets_differ: bool) -> None:
        """Unshare the blocks of a prompt's samples, if each sample is evicted on its own.

        Those with different budgets part before the round, the others after it: then there is less to copy.
        """
        if not self._ledger.any_shared:
            return
        for sequence in list(self._running):
            slot, request = sequence.kv.slot, sequence.request
            if slot is None:  # it gave way to another
                continue
            if not sequence.owns_blocks or not self._ledger.is_shared(slot):
                continue
            if (len(request.evictions) > 1) != budgets_differ or sequence.kv.num_computed < request.fork_at:
                continue
            self.own(sequence)

    def own_before_change(self) -> None:
        """Unshare blocks of sequences before a query or a replay adds to accumulators in them."""
        if not self._ledger.any_shared:
            return
        for sequence in list(self._running):
            if sequence.kv.slot is not None and self._prefixes.is_about_to_change(sequence, self._chunk):
                self.own(sequence)
