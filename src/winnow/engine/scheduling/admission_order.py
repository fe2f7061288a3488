"""Who may enter next, and who is parked for it."""

import sys
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
        self._ledger = memory.ledger
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
                left -= self._memory.room.need(sequence)
                if left < 0:
                    break
                found.append(sequence)
        return found

    def _is_within_limit(self, newcomer: Sequence, running: SequenceType[Sequence]) -> bool:
        tenant = newcomer.request.tenant
        if self._accounts.of(tenant).limit >= 1:
            return True
        return self._use(tenant, running) + self._memory.room.need(newcomer) <= self._accounts.limit(tenant)

    def make_way(self, running: Running) -> list[Sequence]:
        """Park running sequences for waiting ones of higher rank. Returns the sequences that enter in this step."""
        if not self._waiting or not running:
            return []
        urgent: list[Sequence] = []
        blocks = pages = 0
        reclaiming = self._guaranteed(running)
        for sequence in dict.fromkeys(reclaiming + self._outranking(running)):
            need = self._ledger.layout.pages_for(sequence.longest_row(self._ledger.layout))
            slots = len(urgent) + 1 - self._ledger.num_free_slots
            short = min(need, self._ledger.size.num_pages) + pages - self._ledger.pages.num_free
            lacking = partial(self._lacking, sequence, running, blocks)
            reclaims = sequence in reclaiming
            parked = running.victims.for_newcomer(sequence, running, lacking, slots, short, reclaims=reclaims)
            if parked is None:
                continue
            for each in parked:
                running.park(each)
            urgent.append(sequence)
            # Once it runs, another block a row will be promised to it.
            blocks += self._memory.room.need(sequence) + self._ledger.layout.rows_per_seq
            pages += need
        return urgent

    def _lacking(self, sequence: Sequence, running: Running, taken: int, leaving: int) -> int:
        """Return blocks that a waiting sequence lacks beside `taken` ones once `leaving` sequences are parked; endless
        if it cannot start."""
        budget, chunk = self._config.max_num_batched_tokens, self._config.prefill_chunk
        prefixes = self._memory.prefixes
        # Of a whole prompt, also where no tokens of the step are left for it.
        if sequence.is_held_up or (chunk is None and sequence.num_tokens + len(running) > budget):
            return sys.maxsize
        # Decoding sequences take their next KVs before it starts, and then others are promised to them.
        decoding = [s.kv.running_slot for s in running if s.is_decoding]
        coming = self._ledger.demand(decoding, [1] * len(decoding)).blocks
        found = prefixes.find(sequence)
        if prefixes.is_worth_waiting(sequence, found, min(sequence.num_tokens, chunk or budget), running):
            return sys.maxsize
        return taken + coming + self._memory.room.lacking(sequence, running, leaving, found)

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
        decoding = [s.kv.running_slot for s in own if s.is_decoding]
        coming = self._ledger.demand(decoding, [1] * len(decoding)).blocks
        coming += sum(self._memory.room.growth(sequence) for sequence in own if not sequence.is_decoding)
        return self._accounts.held(own) + coming > self._accounts.limit(tenant)

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
        return self._accounts.held(own) + sum(map(self._memory.room.growth, own))
