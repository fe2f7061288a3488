"""Who may enter next, and who is parked for it."""

from collections.abc import Sequence as SequenceType
from functools import partial
from itertools import islice

from winnow.config import SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.accounts import TenantAccounts, of_tenant
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.running import Running
from winnow.values.tenants import TenantName

_LOOKAHEAD = 64
"""Number of waiting sequences that are searched for one that may pass another which does not fit."""


class AdmissionOrder:
    """Rules of which waiting sequences may start, in what order, and which running ones are preempted for them."""

    def __init__(
        self, waiting: WaitingQueue, accounts: TenantAccounts, memory: Memory, config: SchedulerConfig
    ) -> None:
        self._waiting = waiting
        self._accounts = accounts
        self._memory = memory
        self._config = config

    def candidates(self, running: SequenceType[Sequence]) -> list[Sequence]:
        """Return waiting sequences to try in turn; the first that fits is started.

        No sequence is served before the first, however little it needs, unless its prefix is still being read from
        disk, or its pictures computed: room comes free until that fits. Those of tenants within their guarantee come
        first, and those of tenants at their limit do not come at all: they hold up their own tenant alone.
        """
        found = self._guaranteed(running)[:1]
        if not found:
            heads = self._waiting.heads()
            found = list(islice((s for s in heads if self._is_within_limit(s, running)), 1))
        if found and found[0].is_held_up:
            others = islice(self._waiting, _LOOKAHEAD)
            found += [s for s in others if s is not found[0] and self._is_within_limit(s, running)]
        return found

    def _guaranteed(self, running: SequenceType[Sequence]) -> list[Sequence]:
        """Return waiting sequences whose tenants stay within their guarantee with them, and those before them."""
        found: list[Sequence] = []
        if not self._accounts.has_quotas:
            return found
        for head in self._waiting.heads():
            tenant = head.request.tenant
            left = self._accounts.guarantee(tenant)
            if left:
                left -= self._use(tenant, running)
            for sequence in self._waiting.of_tenant(tenant):
                left -= self._memory.need(sequence)
                if left < 0:
                    break
                found.append(sequence)
        return found

    def _is_within_limit(self, newcomer: Sequence, running: SequenceType[Sequence]) -> bool:
        tenant = newcomer.request.tenant
        if self._accounts.of(tenant).limit >= 1:
            return True
        return self._use(tenant, running) + self._memory.need(newcomer) <= self._accounts.limit(tenant)

    def make_way(self, running: Running) -> list[Sequence]:
        """Park running sequences for waiting ones of higher rank. Returns the sequences that enter in this step."""
        if not self._waiting or not running:
            return []
        urgent: list[Sequence] = []
        reclaiming = self._guaranteed(running)
        for sequence in dict.fromkeys(reclaiming + self._outranking(running)):
            if not self._could_start(sequence, running):
                continue
            fits = partial(self._memory.fits_for, sequence, running=running, beside=urgent)
            reclaims = sequence in reclaiming
            parked = running.victims.for_newcomer(sequence, running, fits, reclaims=reclaims)
            if parked is not None:
                for each in parked:
                    running.park(each)
                urgent.append(sequence)
        return urgent

    def _could_start(self, sequence: Sequence, running: Running) -> bool:
        """Return whether a waiting sequence waits for room alone."""
        budget, chunk = self._config.max_num_batched_tokens, self._config.prefill_chunk
        # Of a whole prompt, also where no tokens of the step are left for it.
        if sequence.is_held_up or (chunk is None and sequence.num_tokens + len(running) > budget):
            return False
        count = min(sequence.num_tokens, chunk or budget)
        return not self._memory.prefixes.is_worth_waiting(sequence, count, running)

    def keep_limits(self, running: Running) -> None:
        """Park sequences of tenants above their limits. One sequence of each keeps running."""
        if not self._accounts.has_quotas:
            return
        for tenant in {sequence.request.tenant for sequence in running}:
            own = list(of_tenant(tenant, running))
            while len(own) > 1 and self._exceeds_limit(tenant, own):
                running.park(running.victims.choose(own))
                own = list(of_tenant(tenant, running))

    def _exceeds_limit(self, tenant: TenantName, own: SequenceType[Sequence]) -> bool:
        if self._accounts.of(tenant).limit >= 1:
            return False
        coming = self._memory.next_blocks(own)
        coming += sum(self._memory.growth(sequence) for sequence in own if not sequence.is_decoding)
        return self._memory.held(own) + coming > self._accounts.limit(tenant)

    def _outranking(self, running: SequenceType[Sequence]) -> list[Sequence]:
        """Return waiting sequences that may park running ones by the order, first to last."""
        found: list[Sequence] = []
        may_park = self._waiting.order.may_park
        for sequence in islice(self._waiting, len(running)):
            if not any(may_park(sequence, each) for each in running):
                break
            if self._is_within_limit(sequence, running):
                found.append(sequence)
        return found

    def _use(self, tenant: TenantName, running: SequenceType[Sequence]) -> int:
        """Return blocks that a tenant's running sequences hold or will take soon."""
        own = list(of_tenant(tenant, running))
        return self._memory.held(own) + self._memory.promised(own)
