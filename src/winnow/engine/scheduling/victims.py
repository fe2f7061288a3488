"""WHO gives way when blocks run out."""

from collections.abc import Sequence as SequenceType

from winnow.engine.memory.swap import Swap
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.orders import Order


class LeastLoss:
    """Choice of the sequence of the lowest priority, where the order minds priorities.

    Ties go, in this order, to those that have advanced since they were last preempted, to the least time lost per byte
    that comes free, and to the one served last.

    The sequence first in the serving order is never preempted for another. Where no tenant has a quota they are all
    that run, so that one continues to its end: whatever the others do, requests end. Else the scheduler offers the
    sequences of tenants that borrow blocks, if there are any (`TenantAccounts.borrowers`), before all others and
    whatever their priority.

    Args:
        swap: says what preempting a sequence costs, and whether it has advanced.
        order: who is served first.
    """

    def __init__(self, swap: Swap, order: Order) -> None:
        self._swap = swap
        self._order = order

    def choose(self, running: SequenceType[Sequence]) -> Sequence:
        """Return the sequence to preempt, out of at least one, in the order in which they were admitted."""
        rank, level = self._order.rank, self._order.level
        first = min(running, key=rank)
        others = [sequence for sequence in running if sequence is not first] or [first]
        lowest = min(map(level, others))
        equals = [sequence for sequence in others if level(sequence) == lowest]
        equals = [sequence for sequence in equals if self._swap.has_progressed(sequence)] or equals
        losses = {sequence: self._swap.loss(sequence) for sequence in equals} if len(equals) > 1 else {}
        least = min(losses.values(), default=0.0)
        return max((s for s in equals if losses.get(s, 0.0) <= least), key=rank)
