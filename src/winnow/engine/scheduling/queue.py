"""Sequences that wait for a slot."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import count
from operator import itemgetter
from typing import Any

from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.orders import ByPriority, Order
from winnow.errors import QueueFullError
from winnow.values.tenants import TenantName

_Entry = tuple[tuple[Any, ...], Sequence]
_rank = itemgetter(0)


class WaitingQueue:
    """Sequences that wait for a slot, in the order in which they are served. Both engines wait in one.

    A preempted sequence, and a sample that starts later than its siblings, takes the place of its request.

    Args:
        order: who is served first; left out: the greater priority, without aging.

    Attributes:
        num_tokens: of all that wait, prompts and what there is of answers.
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
        """The sequence that is served next; None: the queue is empty."""
        return next(iter(self.heads()), None)

    def heads(self) -> list[Sequence]:
        """Return the first sequence of each tenant, in the order in which they are served."""
        heads = [(self.order.tenant_rank(tenant), *entries[0]) for tenant, entries in self._tenants.items()]
        return [sequence for _, _, sequence in sorted(heads, key=itemgetter(0, 1))]

    def of_tenant(self, tenant: TenantName) -> Iterator[Sequence]:
        """Return the sequences of one tenant, in order. The queue must not change meanwhile."""
        return (sequence for _, sequence in self._tenants.get(tenant, ()))

    def num_of_tenant(self, tenant: TenantName) -> int:
        return len(self._tenants.get(tenant, ()))

    @property
    def tenants(self) -> list[TenantName]:
        """Tenants that wait."""
        return list(self._tenants)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        """Return all, in order. The queue must not change meanwhile."""
        ranked = [self._ranked(tenant) for tenant in self._tenants]
        return (sequence for _, _, sequence in merge(*ranked, key=itemgetter(0, 1)))

    def _ranked(self, tenant: TenantName) -> Iterator[tuple[float, tuple[Any, ...], Sequence]]:
        first = self.order.tenant_rank(tenant)
        return ((first, rank, sequence) for rank, sequence in self._tenants[tenant])

    def require_room(self, num_tokens: int, max_requests: int | None, max_tokens: int | None) -> None:
        """Check that a request of `num_tokens` tokens may wait here.

        Raises:
            QueueFullError: names need and limit. An empty queue takes any request.
        """
        if max_requests is not None and len(self) >= max_requests:
            raise QueueFullError(
                f"the queue is full: {len(self)} requests wait, and max_queued_requests is {max_requests}; "
                "try again later"
            )
        if max_tokens is not None and len(self) and self.num_tokens + num_tokens > max_tokens:
            raise QueueFullError(
                f"the queue is full: the request has {num_tokens} tokens, {self.num_tokens} wait, and "
                f"max_queued_tokens is {max_tokens}; try again later"
            )
