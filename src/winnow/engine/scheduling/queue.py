"""Sequences that wait for a slot, and the orders in which they are served.

An order ranks tenants, and the sequences of each tenant. The rank of a sequence within its tenant does not change while
it waits; the rank of a tenant may. All ranks are sort keys: the smaller is served first.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from heapq import merge
from itertools import count, repeat
from operator import itemgetter
from typing import Any

from winnow.config import SchedulerConfig
from winnow.engine.requests.request import Request, Sequence
from winnow.values.tenants import OTHERS, TenantName

_TOKENS_A_LEVEL = 1000
"""Under srtf, how many tokens weigh as much as one level of priority."""


class Order:
    """First come, first served; `aging`, where an order has levels, is the seconds of waiting that count as one.

    All age alike, so who is before whom does not change: a sequence never parks the one that it gave way to.
    """

    def __init__(self, aging: float | None = None) -> None:
        self._aging = aging

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        """Sort key of a sequence within its tenant. A preempted one takes the place of its request again."""
        return sequence.request.arrival, sequence.index

    def tenant_rank(self, tenant: TenantName) -> float:
        """Sort key of a tenant; tenants of equal rank are served as one."""
        return 0.0

    def level(self, sequence: Sequence) -> float:
        """Return the preemption level of a sequence: lower ones are preempted first when memory runs out."""
        return 0.0

    def may_park(self, newcomer: Sequence, running: Sequence) -> bool:
        """Return whether a running sequence is parked for a waiting one that does not fit beside it."""
        return False

    def tenant_arrived(self, tenant: TenantName, waiting: Collection[TenantName]) -> None:
        """Handle a request of a tenant that had none waiting; `waiting` are the others that have."""

    def tenant_left(self, tenant: TenantName) -> None:
        """Handle that the last waiting sequence of a tenant left the queue."""

    def charge(self, tenant: TenantName, prompt_tokens: int, output_tokens: int) -> None:
        """Charge a tenant's account with tokens that were, or are about to be, computed."""

    def _aged(self, level: float, sequence: Sequence) -> float:
        """Return a level, of which the smaller is served first, with what all will have waited by any one time."""
        return level if self._aging is None else level + sequence.request.metrics.arrival_time / self._aging


class ByPriority(Order):
    """The greater priority first, ties first come, first served. A greater priority may park lower ones."""

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        return self._aged(-sequence.request.priority, sequence), *super().rank(sequence)

    def level(self, sequence: Sequence) -> float:
        return sequence.request.priority

    def may_park(self, newcomer: Sequence, running: Sequence) -> bool:
        greater = newcomer.request.priority > running.request.priority
        return greater and self.rank(newcomer) < self.rank(running)


class ShortestRemaining(Order):
    """The fewest tokens left to compute first, answers counted at their full length."""

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        left = sequence.num_to_compute + sequence.request.max_tokens - sequence.num_output_tokens
        return self._aged(left / _TOKENS_A_LEVEL, sequence), *super().rank(sequence)


class ByPrompt(ByPriority):
    """Prompts that begin alike one after the other, within a priority, so that each prefix is computed once.

    Sorted tokens are a walk of the tree of prefixes, depth first: no prefix is met again once it was left, however
    little memory keeps it. A request may wait as long as others come that sort before it, which suits a pile of
    prompts and no server.
    """

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        level, *arrival = super().rank(sequence)
        return level, sequence.request.prompt_token_ids, *arrival


class Fair(ByPriority):
    """The tenant that got the least service for its weight first: virtual token counters.

    A counter grows by the prices of the tokens that its tenant gets, divided by its weight (1 where none is named): 1
    for each of a prompt when its request is started, 2 for each of an answer. A tenant that comes back is lifted to the
    least counter of those that wait, so that no tenant saves up service. Counters of tenants that wait all the time
    stay within twice the price of the largest prompt or of all answers that run at once, whatever arrives. Within a
    tenant the greater priority is served first, and may park the tenant's own lower ones.

    Sheng et al., Fairness in Serving Large Language Models (2024), algorithms 2 and 4.
    """

    def __init__(self, weights: Mapping[str, float], aging: float | None = None) -> None:
        super().__init__(aging)
        self._weights = weights
        self._counters: dict[TenantName, float] = {}
        self._last_left: TenantName = None

    def tenant_rank(self, tenant: TenantName) -> float:
        return self._counters.get(tenant, 0.0)

    def may_park(self, newcomer: Sequence, running: Sequence) -> bool:
        return newcomer.request.tenant == running.request.tenant and super().may_park(newcomer, running)

    def tenant_arrived(self, tenant: TenantName, waiting: Collection[TenantName]) -> None:
        least = min(map(self.tenant_rank, waiting)) if waiting else self.tenant_rank(self._last_left)
        self._counters[tenant] = max(self.tenant_rank(tenant), least)

    def tenant_left(self, tenant: TenantName) -> None:
        self._last_left = tenant

    def charge(self, tenant: TenantName, prompt_tokens: int, output_tokens: int) -> None:
        price = prompt_tokens + 2.0 * output_tokens
        weight = self._weights.get(tenant or OTHERS, self._weights.get(OTHERS, 1.0))
        self._counters[tenant] = self.tenant_rank(tenant) + price / weight


def build_order(config: SchedulerConfig) -> Order:
    if config.scheduling_policy == "fair":
        return Fair({tenant.name: tenant.weight for tenant in config.tenants}, config.aging)
    if config.scheduling_policy == "prefix":
        return ByPrompt()
    orders = {"fcfs": Order, "srtf": ShortestRemaining}
    return orders.get(config.scheduling_policy, ByPriority)(config.aging)


_Entry = tuple[tuple[Any, ...], Sequence]
_rank = itemgetter(0)


class WaitingQueue:
    """Sequences that wait for a slot, in the order in which they are served; `num_tokens` are of all, prompts and
    answers.

    A preempted sequence, and a sample that starts later than its siblings, takes the place of its request. Without an
    `order` the greater priority comes first, without aging.
    """

    def __init__(self, order: Order | None = None) -> None:
        self.order = order or ByPriority()
        self.num_tokens = 0
        self._tenants: dict[TenantName, list[_Entry]] = {}
        # A rank as it was when its sequence came; and its tokens.
        self._places: dict[Sequence, tuple[tuple[Any, ...], int]] = {}
        self._arrivals = count()

    def add(self, request: Request) -> None:
        """Queue the first sample of a request that has just arrived."""
        request.arrival = next(self._arrivals)
        if request.tenant not in self._tenants:
            self.order.tenant_arrived(request.tenant, self._tenants.keys())
        self.requeue(request.sequences[0])

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence of a request that has started: a preempted one, or a further sample."""
        rank = self.order.rank(sequence)
        insort(self._tenants.setdefault(sequence.request.tenant, []), (rank, sequence), key=_rank)
        self._places[sequence] = rank, sequence.num_tokens
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a slot or has ended. No effect if it is not in the queue."""
        if sequence not in self._places:
            return
        rank, num_tokens = self._places.pop(sequence)
        self.num_tokens -= num_tokens
        tenant = sequence.request.tenant
        entries = self._tenants[tenant]
        del entries[bisect_left(entries, rank, key=_rank)]
        if not entries:
            del self._tenants[tenant]
            self.order.tenant_left(tenant)

    @property
    def first(self) -> Sequence | None:
        return next(iter(self.heads()), None)

    def heads(self) -> list[Sequence]:
        """Return the first sequence of each tenant, in the order in which they are served."""
        heads = [(self.order.tenant_rank(tenant), *entries[0]) for tenant, entries in self._tenants.items()]
        return [sequence for _, _, sequence in sorted(heads, key=itemgetter(0, 1))]

    def of_tenant(self, tenant: TenantName) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._tenants.get(tenant, ()))

    def num_of_tenant(self, tenant: TenantName) -> int:
        return len(self._tenants.get(tenant, ()))

    @property
    def tenants(self) -> list[TenantName]:
        return list(self._tenants)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """Return all, in order. The queue must not change meanwhile."""
        ranked = (zip(repeat(self.order.tenant_rank(t)), entries) for t, entries in self._tenants.items())
        return (sequence for _, (_, sequence) in merge(*ranked, key=lambda each: (each[0], each[1][0])))
