"""Who gives way when blocks run out, and how."""

from collections.abc import Sequence as SequenceType
from typing import Protocol

from winnow.cache import Ledger
from winnow.engine.kv_state import KVState
from winnow.engine.orders import Order
from winnow.engine.request import Sequence


class VictimPolicy(Protocol):
    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        """The sequence to preempt, out of at least one, in the order in which they were admitted."""


class PreemptionMethod(Protocol):
    def preempt(self, sequence: Sequence, ledger: Ledger) -> None:
        """Take the sequence's slot and blocks, so that it can go on later."""


class LastServed:
    """Who would be served last: the lowest priority, the tenant that got most, or who came last, by the order."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        order = self._order
        return max(running, key=lambda s: (order.tenant_rank(s.request.tenant), order.rank(s)))


class Recompute:
    """Drop all KVs. The sequence keeps its tokens and computes them again when there is room."""

    def preempt(self, sequence: Sequence, ledger: Ledger) -> None:
        ledger.close(sequence.kv.running_slot)
        sequence.kv = KVState()
