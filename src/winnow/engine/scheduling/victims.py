"""Who gives way, and why: every running sequence that is preempted is chosen here."""

from collections.abc import Callable, Sequence as SequenceType

from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.values.tenants import TenantName


class Victims:
    """Choice of the running sequences to preempt, by reason.

    - Blocks ran out: one of a tenant that borrows blocks, if there are any (`for_blocks`).
    - A tenant is above its limit: one of its own (`choose`).
    - A waiting sequence outranks running ones, or its tenant's guarantee is lent to others: those that would be served
      last, until it fits (`for_newcomer`). The order is what was asked for, so losses do not count.
    """

    def __init__(self, memory: Memory, waiting: WaitingQueue, accounts: TenantAccounts) -> None:
        self._memory, self._waiting, self._accounts = memory, waiting, accounts

    def for_blocks(self, running: SequenceType[Sequence]) -> Sequence:
        return self.choose(self._accounts.borrowers(running))

    def choose(self, sequences: SequenceType[Sequence]) -> Sequence:
        """Return the sequence to preempt, out of at least one, in the order in which they were admitted.

        It is of the lowest priority, where the order minds priorities. Ties go, in this order, to those that have
        advanced since they were last preempted, to the least time lost per byte that comes free, and to the one served
        last. The first in the serving order is never preempted for another: whatever the others do, requests end.
        """
        rank, level = self._waiting.order.rank, self._waiting.order.level
        first = min(sequences, key=rank)
        others = [sequence for sequence in sequences if sequence is not first] or [first]
        lowest = min(map(level, others))
        equals = [sequence for sequence in others if level(sequence) == lowest]
        equals = list(filter(self._has_progressed, equals)) or equals
        losses = {each: self._memory.swap.loss(each) for each in equals} if len(equals) > 1 else {}
        least = min(losses.values(), default=0.0)
        return max((s for s in equals if losses.get(s, 0.0) <= least), key=rank)

    def _has_progressed(self, sequence: Sequence) -> bool:
        """Return whether a sequence got a block of tokens since its last preemption; else it would go to and fro."""
        before = sequence.num_tokens_preempted
        return before is None or sequence.num_tokens - before >= self._memory.layout.block_size

    def for_newcomer(
        self,
        newcomer: Sequence,
        running: SequenceType[Sequence],
        fits: Callable[[SequenceType[Sequence]], bool],
        *,
        reclaims: bool,
    ) -> list[Sequence] | None:
        """Return the running sequences to park, so that `newcomer` fits; None: there are not enough.

        What a tenant holds within its guarantee gives way only to the tenant itself.

        Args:
            fits: whether it does once these have left.
            reclaims: whether tenants that borrow give back to `newcomer` whatever the order says.
        """
        order, own, quotas = self._waiting.order, newcomer.request.tenant, self._accounts.has_quotas
        borrowed: dict[TenantName, int] = {}
        if quotas:
            tenants = {sequence.request.tenant for sequence in running}
            borrowed = {tenant: self._accounts.borrowed(tenant, running) for tenant in tenants}
        chosen: list[Sequence] = []
        last = sorted(
            running, key=lambda s: (order.tenant_rank(s.request.tenant), order.rank(s)), reverse=True
        )
        for sequence in last:
            if fits(chosen):
                return chosen
            tenant = sequence.request.tenant
            borrows = borrowed.get(tenant, 0) > 0
            outranks = order.may_park(newcomer, sequence) and (not quotas or tenant == own or borrows)
            if not outranks and not (reclaims and tenant != own and borrows):
                continue
            chosen.append(sequence)
            if quotas:
                borrowed[tenant] -= self._memory.freed(sequence)
        return chosen if fits(chosen) else None
