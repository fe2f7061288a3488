"""Who gives way when blocks run out, and how."""

from collections.abc import Sequence as SequenceType
from typing import Protocol

from winnow.cache import Ledger
from winnow.engine.kv_state import KVState
from winnow.engine.queue import serving_order
from winnow.engine.request import Sequence


class VictimPolicy(Protocol):
    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        """The sequence to preempt, out of at least one, in the order in which they were admitted."""


class PreemptionMethod(Protocol):
    def preempt(self, sequence: Sequence, ledger: Ledger) -> None:
        """Take the sequence's slot and blocks, so that it can go on later."""


class LeastUrgent:
    """The lowest priority, and among equals who came last: who is served first goes on to the end."""

    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        return max(running, key=serving_order)


class Recompute:
    """Drop all KVs. The sequence keeps its tokens and computes them again when there is room."""

    def preempt(self, sequence: Sequence, ledger: Ledger) -> None:
        ledger.close(sequence.kv.running_slot)
        sequence.kv = KVState()
