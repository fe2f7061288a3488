"""How much each tenant may hold, holds, and got."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence as SequenceType

from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.queue import Order, WaitingQueue
from winnow.outputs import TenantStats
from winnow.values.tenants import TenantName


class TenantAccounts:
    """Shares of the blocks, lent and given back, and the books of every tenant.

    A tenant gets what is free, up to its limit. What a tenant holds above its guarantee is borrowed, from the part that
    is not guaranteed and from guarantees that others do not use; the scheduler takes it back when one of them needs it.
    """

    def __init__(self, memory: Memory, order: Order) -> None:
        self._order = order
        self._memory, self._num_blocks = memory, memory.size.num_blocks
        tenants = memory.tenants
        self.of, self.has_quotas, self._tenants = tenants.of, tenants.has_quotas, tenants.named
        self._prompt_tokens: Counter[TenantName] = Counter()
        self._output_tokens: Counter[TenantName] = Counter()

    def guarantee(self, tenant: TenantName) -> int:
        """Return blocks that a tenant can have back at any time."""
        return int(self.of(tenant).guarantee * self._num_blocks)

    def limit(self, tenant: TenantName) -> int:
        """Return blocks that a tenant never exceeds."""
        return int(self.of(tenant).limit * self._num_blocks)

    def borrowed(self, tenant: TenantName, running: SequenceType[Sequence]) -> int:
        return max(self._memory.held(of_tenant(tenant, running)) - self.guarantee(tenant), 0)

    def borrowers(self, running: SequenceType[Sequence]) -> SequenceType[Sequence]:
        """Return sequences of tenants above their guarantee, which go before others; all, if there are none."""
        if not self.has_quotas:
            return running
        tenants = {sequence.request.tenant for sequence in running}
        borrowing = {tenant for tenant in tenants if self.borrowed(tenant, running)}
        return [sequence for sequence in running if sequence.request.tenant in borrowing] or running

    def charge(self, tenant: TenantName, prompt_tokens: int, output_tokens: int) -> None:
        self._order.charge(tenant, prompt_tokens, output_tokens)
        self._prompt_tokens[tenant] += prompt_tokens
        self._output_tokens[tenant] += output_tokens

    def stats(self, running: SequenceType[Sequence], waiting: WaitingQueue) -> dict[str, TenantStats]:
        names: list[TenantName] = list(self._tenants)
        names += [each for each in (*self._prompt_tokens, *waiting.tenants) if each not in self._tenants]
        stats: dict[str, TenantStats] = {}
        if not any(names):  # counting blocks takes time, and here they are everybody's
            return stats
        for name in dict.fromkeys(names):
            own = list(of_tenant(name, running))
            blocks, guarantee = self._memory.held(own), self.guarantee(name)
            stats[name or ""] = TenantStats(
                num_running=len(own),
                num_waiting=waiting.num_of_tenant(name),
                blocks=blocks,
                guaranteed_blocks=guarantee,
                limit_blocks=self.limit(name),
                borrowed_blocks=max(blocks - guarantee, 0),
                host_bytes=self._memory.swap.host_bytes[name],
                prompt_tokens=self._prompt_tokens[name],
                output_tokens=self._output_tokens[name],
                virtual_tokens=waiting.order.tenant_rank(name),
            )
        return stats


def of_tenant(tenant: TenantName, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    return (sequence for sequence in sequences if sequence.request.tenant == tenant)
