"""WHO may enter next, how much must stay free, and who is parked for it."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceType
from itertools import islice
from typing import NamedTuple

from winnow.cache import Ledger
from winnow.config import SchedulerConfig
from winnow.engine.accounts import TenantAccounts, of_tenant
from winnow.engine.orders import TenantName
from winnow.engine.queue import WaitingQueue
from winnow.engine.request import Sequence

_LOOKAHEAD = 64
"""Waiting sequences that may pass one which does not fit are looked for among so many."""


class Shortage(NamedTuple):
    """What must become free before a waiting sequence can start; nothing where it is not positive."""

    blocks: int
    slots: int
    pages: int

    @property
    def any(self) -> bool:
        return max(self) > 0


class Watermarks:
    """Room that newcomers leave to those that run, with hysteresis.

    Nothing is held back while nothing runs.
    """

    def __init__(self, config: SchedulerConfig, ledger: Ledger) -> None:
        self._allocator = ledger.allocator
        low = config.watermark_high if config.watermark_low is None else config.watermark_low
        self._high = int(config.watermark_high * ledger.size.num_blocks)
        self._low = int(low * ledger.size.num_blocks)
        self._closed = False

    @property
    def reserve(self) -> int:
        """Blocks above the high watermark, which are kept free for those that run."""
        return self._allocator.num_blocks - self._high

    def may_enter(self, *, idle: bool) -> bool:
        """Whether newcomers are considered: not after one was held back, until use is down at the low watermark."""
        if idle or self._allocator.num_used <= self._low:
            self._closed = False
        return not self._closed

    def hold_back(self) -> None:
        """A sequence did not fit below the high watermark."""
        self._closed = True


class Entry:
    """Says which waiting sequences may start, in what order, and which running ones give way to them.

    Args:
        promised: blocks that a running sequence will take soon, with those that it holds.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        accounts: TenantAccounts,
        ledger: Ledger,
        max_passes: int,
        promised: Callable[[Sequence], int],
    ) -> None:
        self._waiting = waiting
        self._accounts = accounts
        self._ledger = ledger
        self._max_passes = max_passes
        self._promised = promised

    # -- in what order -----------------------------------------------------------------------------------------------

    def candidates(self, running: SequenceType[Sequence]) -> list[Sequence]:
        """Waiting sequences to try in turn; the first that fits is started.

        Those of tenants within their guarantee come first, and those of tenants at their limit do not come at all: they
        hold up nobody but their own tenant.
        """
        if not self._accounts.has_quotas:
            first = self._waiting.first
            found = [] if first is None else [first]
        else:
            found = [s for s in self._guaranteed(running)][:1]
            open_heads = (s for s in self._waiting.heads() if self.is_within_limit(s, running))
            found += [s for s in islice(open_heads, 1) if s not in found]
        if found and found[-1].num_passed < self._max_passes:
            others = islice(self._waiting, _LOOKAHEAD)
            found += [s for s in others if s not in found and self.is_within_limit(s, running)]
        return found

    def is_within_limit(self, newcomer: Sequence, running: SequenceType[Sequence]) -> bool:
        """Whether a sequence may start without its tenant exceeding its limit."""
        tenant = newcomer.request.tenant
        if self._accounts.of(tenant).limit >= 1:
            return True
        return self._use(tenant, running) + self._need(newcomer) <= self._accounts.limit(tenant)

    def over_limit(self, tenant: TenantName, own: SequenceType[Sequence]) -> bool:
        """Whether what a tenant's running sequences hold and take in the next step exceeds its limit."""
        decoding = [s.kv.running_slot for s in own if s.is_decoding]
        coming = self._ledger.demand(decoding, [1] * len(decoding)).blocks
        coming += sum(self._growth(sequence) for sequence in own if not sequence.is_decoding)
        return self._accounts.held(own) + coming > self._accounts.limit(tenant)

    def _guaranteed(self, running: SequenceType[Sequence]) -> Iterator[Sequence]:
        """Waiting sequences of tenants that stay within their guarantee with them."""
        for head in self._waiting.heads():
            tenant = head.request.tenant
            guarantee = self._accounts.guarantee(tenant)
            if not guarantee:
                continue
            use = self._use(tenant, running)
            for sequence in self._waiting.of_tenant(tenant):
                use += self._need(sequence)
                if use > guarantee:
                    break
                yield sequence

    # -- who gives way -----------------------------------------------------------------------------------------------

    def outranking(self, running: SequenceType[Sequence]) -> list[Sequence]:
        """Waiting sequences that enter even if running ones must be parked for it, in order."""
        found = dict.fromkeys(self._guaranteed(running)) if self._accounts.has_quotas else {}
        may_park = self._waiting.order.may_park
        for sequence in islice(self._waiting, len(running)):
            if not any(may_park(sequence, each) for each in running):
                break
            if self.is_within_limit(sequence, running):
                found[sequence] = None
        return list(found)

    def choose_parked(
        self, newcomer: Sequence, running: SequenceType[Sequence], shortage: Shortage
    ) -> list[Sequence] | None:
        """The running sequences to park, so that `newcomer` lacks nothing; None: there are not enough.

        Those of tenants that borrow most go first, then those that would be served last. What a tenant holds within
        its guarantee gives way to nobody but the tenant itself.
        """
        chosen: list[Sequence] = []
        borrowed = {
            tenant: self._accounts.borrowed(tenant, running)
            for tenant in {sequence.request.tenant for sequence in running}
        }
        order, own = self._waiting.order, newcomer.request.tenant
        reclaims = self._accounts.has_quotas and newcomer in self._guaranteed(running)
        for sequence in sorted(
            running, key=lambda s: (order.tenant_rank(s.request.tenant), order.rank(s)), reverse=True
        ):
            if not shortage.any:
                break
            tenant = sequence.request.tenant
            entitled = not self._accounts.has_quotas or tenant == own or borrowed[tenant] > 0
            if not entitled or not (
                order.may_park(newcomer, sequence) or (reclaims and tenant != own and borrowed[tenant] > 0)
            ):
                continue
            chosen.append(sequence)
            freed = self._frees(sequence)
            borrowed[tenant] -= freed
            shortage = Shortage(
                shortage.blocks - freed - self._growth(sequence),
                shortage.slots - 1,
                shortage.pages - len(self._ledger.pages.of(sequence.kv.running_slot)),
            )
        return None if shortage.any else chosen

    # -- inside ------------------------------------------------------------------------------------------------------

    def _frees(self, sequence: Sequence) -> int:
        """Blocks that nobody else holds, but for the prefix index."""
        blocks, allocator = self._ledger.blocks_of(sequence.kv.running_slot), self._ledger.allocator
        return int((allocator.holders[blocks] - allocator.indexed[blocks] == 1).sum())

    def _growth(self, sequence: Sequence) -> int:
        return self._promised(sequence) - self._ledger.blocks_held(sequence.kv.running_slot)

    def _need(self, newcomer: Sequence) -> int:
        return newcomer.peak_blocks(self._ledger.layout)

    def _use(self, tenant: TenantName, running: SequenceType[Sequence]) -> int:
        """Blocks that a tenant's running sequences hold or will take soon."""
        own = list(of_tenant(tenant, running))
        return self._accounts.held(own) + sum(map(self._growth, own))
