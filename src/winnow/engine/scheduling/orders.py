"""WHO is served first: orders of waiting sequences, of which a queue follows one.

An order ranks tenants, and the sequences of each tenant. The rank of a sequence within its tenant does not change while
it waits; the rank of a tenant may. All ranks are sort keys: the smaller is served first.
"""

from collections.abc import Collection, Mapping
from typing import Any

from winnow.config import SchedulerConfig
from winnow.engine.requests.request import Sequence
from winnow.values.tenants import OTHERS, TenantName

"""None: requests on nobody's account in particular, who together count as one."""

_TOKENS_A_LEVEL = 1000
"""Under srtf, how many tokens weigh as much as one level of priority."""


class Order:
    """First come, first served."""

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


class ByPriority(Order):
    """The greater priority first, ties first come, first served. A greater priority may park lower ones.

    With aging, each `aging` seconds of waiting count as one level. All age alike, so who is before whom does not
    change: a sequence that was parked never parks the one that it gave way to.
    """

    def __init__(self, aging: float | None = None) -> None:
        self._aging = aging

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        request = sequence.request
        return _aged(-request.priority, sequence, self._aging), *super().rank(sequence)

    def level(self, sequence: Sequence) -> float:
        return sequence.request.priority

    def may_park(self, newcomer: Sequence, running: Sequence) -> bool:
        greater = newcomer.request.priority > running.request.priority
        return greater and self.rank(newcomer) < self.rank(running)


class ShortestRemaining(Order):
    """The fewest tokens left to compute first, answers counted at their full length; `aging` as for priorities."""

    def __init__(self, aging: float | None = None) -> None:
        self._aging = aging

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        left = sequence.num_to_compute + sequence.request.max_tokens - sequence.num_output_tokens
        return _aged(left / _TOKENS_A_LEVEL, sequence, self._aging), *super().rank(sequence)


class ByPrompt(ByPriority):
    """Prompts that begin alike one after the other, within a priority, so that each prefix is computed once.

    Sorted tokens are a walk of the tree of prefixes, depth first: no prefix is met again once it was left, however
    little memory keeps it. A request may wait as long as others come that sort before it, which suits a pile of
    prompts and no server.
    """

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        level, *arrival = super().rank(sequence)
        return level, sequence.request.prompt_token_ids, *arrival


class Fair(Order):
    """The tenant that got the least service for its weight first: virtual token counters.

    A counter grows by the prices of the tokens that its tenant gets, divided by its weight: 1 for each of a prompt when
    its request is started, 2 for each of an answer. A tenant that comes back is lifted to the least counter
    of those that wait, so that no tenant saves up service. Counters of tenants that wait all the time stay within
    twice the price of the largest prompt or of all answers that run at once, whatever arrives. Within a tenant the
    greater priority is served first, and may park the tenant's own lower ones.

    Sheng et al., Fairness in Serving Large Language Models (2024), algorithms 2 and 4.

    Args:
        weights: by tenant; those not named have the weight of "*", else 1.
    """

    def __init__(self, weights: Mapping[str, float], aging: float | None = None) -> None:
        self._weights = weights
        self._within = ByPriority(aging)
        self._counters: dict[TenantName, float] = {}
        self._last_left: TenantName = None

    def rank(self, sequence: Sequence) -> tuple[Any, ...]:
        return self._within.rank(sequence)

    def level(self, sequence: Sequence) -> float:
        return self._within.level(sequence)

    def tenant_rank(self, tenant: TenantName) -> float:
        return self._counters.get(tenant, 0.0)

    def may_park(self, newcomer: Sequence, running: Sequence) -> bool:
        same = newcomer.request.tenant == running.request.tenant
        return same and self._within.may_park(newcomer, running)

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
    """Build the order that the option `scheduling_policy` names."""
    if config.scheduling_policy == "fcfs":
        return Order()
    if config.scheduling_policy == "srtf":
        return ShortestRemaining(config.aging)
    if config.scheduling_policy == "fair":
        weights = {tenant.name: tenant.weight for tenant in config.tenants}
        return Fair(weights, config.aging)
    if config.scheduling_policy == "prefix":
        return ByPrompt()
    return ByPriority(config.aging)


def _aged(level: float, sequence: Sequence, aging: float | None) -> float:
    """Return a level, of which the smaller is served first, with what all will have waited by any one time."""
    return level if aging is None else level + sequence.request.metrics.arrival_time / aging
