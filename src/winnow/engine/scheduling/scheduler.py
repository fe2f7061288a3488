"""WHEN: which sequences take part in a step, and with how many tokens.

Decodes come first, then the prefill chunks of running prompts, then new requests by priority and arrival, until the
step's token budget is spent. Nothing here knows a model: the simulator runs the same object with a virtual clock.
"""

import sys
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.cache import Demand, Ledger, OutOfBlocksError
from winnow.cache.layout import IntArray
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.requests.beams import Continuation
from winnow.engine.requests.kv_state import KVState
from winnow.engine.requests.request import Request, RoundTally, Sequence
from winnow.engine.residency.block_ownership import BlockOwnership
from winnow.engine.residency.disk_prefixes import DiskPrefixes
from winnow.engine.residency.disk_tier import DiskTier
from winnow.engine.residency.preemption import (
    LeastLoss,
    Preemption,
    PreemptionTally,
    VictimPolicy,
)
from winnow.engine.residency.preemption_costs import PreemptionCosts
from winnow.engine.residency.prefix_store import PrefixStore
from winnow.engine.residency.prefixes import FoundPrefix, PrefixSharing
from winnow.engine.residency.replays import drop_finished, replaying
from winnow.engine.residency.running import Running
from winnow.engine.residency.saved_prefixes import SavedPrefixes
from winnow.engine.residency.sequence_forks import SequenceForks
from winnow.engine.residency.sessions import Sessions
from winnow.engine.residency.tier_grants import TierGrants
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.admission_budget import AdmissionBudget
from winnow.engine.scheduling.admission_order import AdmissionOrder
from winnow.engine.scheduling.drafts import Drafts
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler, at_step
from winnow.engine.scheduling.lookahead import Lookahead
from winnow.engine.scheduling.orders import TenantName, build_order
from winnow.engine.scheduling.payoff import CompressionDecisions
from winnow.engine.scheduling.plan_builder import PlanBuilder, ScheduledStep
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.eviction import LATE_STEPS


class Scheduler:
    """Scheduler of sequences as they are queued, on a token budget.

    Attributes:
        ledger: the accounting of the cache, which is the scheduler's own; the executor follows it.
        prefixes: who shares what with whom.
        saved_prefixes: those that a user has saved.
        disk: those that go to disk by themselves; None: none do.
        waiting: sequences without a slot.
        running: sequences with a slot, in the order in which they were admitted.
        drafts: what is proposed of answers.
        accounts: what tenants may hold, hold and got.
        lookahead: planner of a step whose predecessor is not known yet.
        decisions: whether compressing pays.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        clock: Callable[[], float],
        victims: VictimPolicy | None = None,
        costs: PreemptionCosts | None = None,
        max_round_kvs: int | None = None,
        prefix_caching: bool = False,
        host_bytes: int = 0,
        prefix_store: PrefixStore | None = None,
        disk_tier: DiskTier | None = None,
        session_memory: int | None = None,
    ) -> None:
        self.drafts = Drafts(config.speculative_config, executor.layout)
        self.waiting = WaitingQueue(build_order(config))
        self._config = config
        self.ledger = Ledger(executor.layout, executor.size, host_bytes)
        self._clock = clock
        self.accounts = TenantAccounts(config.tenants, self.ledger)
        self._foresees = executor.overlaps
        self._preemption = Preemption(executor, self.ledger, clock, costs, self.accounts)
        self.saved_prefixes = SavedPrefixes(executor, self.ledger, prefix_store)
        self.disk: DiskPrefixes | None = None
        if disk_tier is not None:
            self.disk = DiskPrefixes(executor, self.ledger, self.saved_prefixes, disk_tier)
        on_disk = () if self.disk is None else (self.disk.holds,)
        self.sessions = Sessions(self.ledger, clock, session_memory, self.accounts.session_memory, *on_disk)
        self.prefixes = PrefixSharing(
            self.ledger, prefix_caching, self.saved_prefixes, self.disk, self.sessions
        )
        self._budget = AdmissionBudget(config, self.ledger, self.prefixes)
        victims = victims or LeastLoss(
            self._preemption.loss, self._preemption.has_progressed, self.waiting.order
        )
        self.running = Running(
            executor,
            self.ledger,
            self.waiting,
            self._preemption,
            self.prefixes,
            self.sessions,
            victims,
            self.accounts,
            self._budget,
        )
        self._ownership = BlockOwnership(self.ledger, self.prefixes, self.running, config.prefill_chunk)
        self._rounds = EvictionScheduler(
            executor, self.ledger, clock, max_round_kvs, self._ownership, self.prefixes
        )
        self.lookahead = Lookahead(self.ledger, self.running, self.waiting, self.accounts, self._rounds)
        self._forks = SequenceForks(self.ledger, executor, self.running, self.waiting)
        self._admission_order = AdmissionOrder(
            self.waiting, self.accounts, self.ledger, self._budget, config.max_passes
        )
        self.decisions = CompressionDecisions(self.ledger, self._budget, self._preemption.costs, self.rounds)
        self._grants = TierGrants(self.ledger, executor, config)
        self._builder = PlanBuilder(self.ledger, self.running, self.waiting)

    @property
    def rounds(self) -> RoundTally:
        """Tally of all rounds of eviction so far."""
        return self._rounds.total

    @property
    def preemptions(self) -> PreemptionTally:
        """Tally of all preemptions so far."""
        return self._preemption.total

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        self.prefixes.prefetch(request.sequences[0])

    def fork(self, parent: Sequence, request: Request) -> None:
        """Start a request of one sequence that continues from what `parent` has computed so far.

        It computes its tokens itself, later, where `parent` has no slot or there is none for it.
        """
        [child] = request.sequences
        self.waiting.add(request)
        if self._forks.fork(parent, child):
            self.waiting.remove(child)
            parent.request.forked = request.forked = True
            request.num_cached_tokens = min(child.kv.num_computed, child.prompt_len)
            request.update_metrics(first_scheduled_time=self._clock())

    def continue_beams(self, request: Request, chosen: list[Continuation]) -> None:
        """Continue the chosen beams of a request, and end the others."""
        assert request.beams is not None, "only beams are chosen"
        request.beams.go_on(self._forks.continue_beams(request, chosen))

    def schedule(self) -> ScheduledStep:
        """Plan the next step and take the blocks that it needs. The plan is empty only if nothing is unfinished."""
        try:
            return self._schedule()
        except BaseException:
            # Rows may have room for tokens that are not computed, or half a round behind them.
            self.running.recompute_all()
            raise

    def _schedule(self) -> ScheduledStep:
        self._grants.ask(again=not self.running)
        self._rounds.start_step()
        self.prefixes.write_to_disk()
        self._admission_order.keep_limits(self.running)
        while True:
            self._resume_next()
            drop_finished(self.ledger, self.running)
            self.ledger.drop_unseen([s.kv.running_slot for s in self.running if s.slides(self.ledger.layout)])
            self._ownership.unshare_samples(budgets_differ=True)
            waits = self._rounds.evict_due(self.running)
            self._ownership.unshare_samples(budgets_differ=False)
            self._ownership.own_before_change()  # after rounds, of which the index may hold what they left
            self._make_room()
            urgent = self._make_way()
            if any([self._resume(sequence) for sequence in urgent]):
                continue  # a round of theirs may be due
            step = self._plan(waits | replaying(self.ledger, self.running)[0], urgent)
            if step.sequences or not self.has_unfinished:
                return self._rounds.foresee(step) if self._foresees else step
            if (
                self.prefixes.await_any(self.waiting)
                or waits
                or self._rounds.evict_under_pressure(self.running)
            ):
                continue
            # Only prompts in progress are left, and together they hold all blocks: one gives way.
            self.running.preempt()

    def _plan(self, waits: set[Sequence], urgent: list[Sequence]) -> ScheduledStep:
        """Plan the sequences that need not wait for a round, and passes of the replays that come before one.

        Args:
            urgent: waiting sequences that start before prompts in progress go on.
        """
        budget = self._config.max_num_batched_tokens
        planned, drafts = self._append_decodes(waits, budget)
        budget -= sum(count for _, count in planned) if drafts else len(planned)
        # In most steps everybody decodes, and no other sequence need be looked at again.
        rest = list(self.running) if len(planned) < len(self.running) else ()
        for sequence in urgent:
            if sequence in self.waiting and (first := self._start(sequence, budget)):
                planned.append((sequence, first))
                budget -= first
        # Found anew: to make room for the decoding ones, others may have been preempted.
        missing = replaying(self.ledger, self.running)[1] if waits else {}
        taken, chunks = Demand(), []
        for sequence in rest:
            if sequence in missing:
                count = min(missing[sequence], budget, self._config.prefill_chunk or budget)
            elif sequence.is_decoding or sequence in waits or not sequence.num_to_compute:
                continue
            else:
                count = self._chunk(sequence, budget)
            if not count:
                break
            more = taken.plus(self.ledger.demand([sequence.kv.running_slot], [count]))
            if self.ledger.has_room_for(more):
                chunks.append((sequence, count))
                taken, budget = more, budget - count
        self._append(chunks)
        planned += chunks
        self.prefixes.note_wanted(self.waiting)
        while first := self._admit_next(budget):
            planned.append((self.running[-1], first))
            budget -= first
        return self._builder.build(planned, drafts)

    def _append_decodes(
        self, waits: set[Sequence], most: int
    ) -> tuple[list[tuple[Sequence, int]], dict[Sequence, list[int]]]:
        """Take room for one more KV a row of the decoding sequences, `most` of them, and for what is proposed of them.

        Where there is none, nothing is proposed, what policies allow is compressed, and then sequences are preempted,
        until there is. Returns the sequences with numbers of tokens, and the proposals.
        """
        proposes = True
        while True:
            decoding = [s for s in self.running if s.is_decoding and s not in waits][:most]
            drafts = self.drafts.propose(decoding, most - len(decoding)) if proposes else {}
            planned = [(s, 1 + len(drafts[s]) if s in drafts else 1) for s in decoding]
            try:
                self._append(planned)
                return planned, drafts
            except OutOfBlocksError:
                proposes = False
                if not drafts and not self._rounds.evict_under_pressure(self.running):
                    self.running.preempt()

    def _make_room(self) -> None:
        """Compress what runs for the first waiting sequence, where policies allow that and it would be admitted."""
        able = [s for s in self._rounds.making_room(self.running) if self.decisions.allows(s)]
        if not able or not self.waiting:
            return
        first = next(iter(self._admission_order.candidates(self.running)), None)
        if first is None or not self.ledger.can_open(first.longest_row(self.ledger.layout)):
            return
        lacking = self._budget.lacking(first, self.running)
        for step in (*LATE_STEPS, None) if lacking > 0 else ():
            if sum(self._budget.yields(sequence, at_step(sequence, step)) for sequence in able) >= lacking:
                self._rounds.make_room(able, self.running, step)
                return

    def _append(self, planned: list[tuple[Sequence, int]]) -> None:
        """Take room for the next tokens of each sequence, as many as stand beside it."""
        if planned:
            self.ledger.append([s.kv.running_slot for s, _ in planned], [count for _, count in planned])

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Return tokens of a prompt that this step computes; 0 if it must wait for a step with more room."""
        if (replay := sequence.next_pass) is not None:  # what it begins with is compressed once more
            return max(min(replay.length, budget, self._config.prefill_chunk or budget), 0)
        most, wanted = max(budget, 0), sequence.num_to_compute  # a whole prompt may have overdrawn the budget
        if self._config.prefill_chunk is None:
            # Whole prompts: one that is larger than any budget goes alone.
            if budget == self._config.max_num_batched_tokens:
                most = wanted
        else:
            most = min(budget, self._config.prefill_chunk)
        wanted = min(wanted, self.prefixes.until_state(sequence))
        if sequence.forks:
            wanted = min(wanted, sequence.request.fork_at - sequence.kv.num_computed)
        eviction = sequence.eviction
        if eviction is not None:
            kvs = 0.0 if sequence.kv.slot is None else self._rounds.mean_kvs(sequence)
            wanted = eviction.chunk(sequence.kv.num_computed, sequence.kv.last_round, kvs, wanted, most)
        if self._config.prefill_chunk is None:
            return wanted if wanted <= most else 0
        return min(wanted, most)

    def _make_way(self) -> list[Sequence]:
        """Park running sequences for waiting ones that outrank them. Returns those that enter in this step."""
        if not self.waiting or not self.running:
            return []
        return self._admission_order.make_way(self.running, self._lacking_for_urgent)

    def _lacking_for_urgent(self, sequence: Sequence, leaving: int) -> int:
        """Return blocks that a waiting sequence lacks once `leaving` ones are parked; endless if it cannot start."""
        whole = self._config.prefill_chunk is None
        if whole and sequence.num_tokens + len(self.running) > self._config.max_num_batched_tokens:
            return sys.maxsize  # the step would have no tokens for it
        if sequence.is_reading:
            return sys.maxsize
        # Decoding sequences take their next KVs before it starts, and then others are promised to them.
        decoding = [s.kv.running_slot for s in self.running if s.is_decoding]
        coming = self.ledger.demand(decoding, [1] * len(decoding)).blocks
        found = self.prefixes.find(sequence)
        most = self._config.prefill_chunk or self._config.max_num_batched_tokens
        if self.prefixes.is_worth_waiting(sequence, found, min(sequence.num_tokens, most), self.running):
            return sys.maxsize
        return coming + self._budget.lacking(sequence, self.running, leaving, found)

    def _admit_next(self, budget: int) -> int:
        """Start the next waiting sequence that may enter. Returns the tokens it computes in this step, or 0."""
        if not self.waiting or not self._budget.is_open(self.running):
            return 0
        passed: list[Sequence] = []
        for sequence in self._admission_order.candidates(self.running):
            if count := self._start(sequence, budget):
                for each in passed:
                    each.times_overtaken += 1
                return count
            passed.append(sequence)
        return 0

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Start a waiting sequence if it fits, and take room for the tokens that it computes in this step. Returns
        their number, or 0."""
        if sequence.kv.host_id is not None:
            return 0  # a swapped one resumes before the next step is planned
        self.decisions.note_start(sequence, self.waiting, self.running)
        if not self.ledger.can_open(sequence.longest_row(self.ledger.layout)):
            return 0
        if not self.prefixes.is_ready(sequence, lambda: self._budget.lacking(sequence, self.running) <= 0):
            return 0
        prefix = self.prefixes.find(sequence)
        sequence.kv = prefix.state
        count = self._chunk(sequence, budget)
        waits = self.prefixes.is_worth_waiting(sequence, prefix, count, self.running)
        lacking = 0 if waits or not count else self._budget.lacking(sequence, self.running, prefix=prefix)
        if waits or not count or lacking > 0:
            sequence.kv = KVState()
            if lacking > 0:
                self._budget.hold_back()
            return 0
        if not self._enter(sequence, prefix, count):
            sequence.kv = KVState()
            self._budget.hold_back()
            return 0
        self.waiting.remove(sequence)
        sequence.fetch = None
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.update_metrics(first_scheduled_time=self._clock())
            self._charge(sequence.request.tenant, sequence.prompt_len - sequence.kv.num_computed, 0)
        self.running.enter(sequence)
        self.decisions.started(sequence)
        return count

    def _enter(self, sequence: Sequence, prefix: FoundPrefix, count: int) -> bool:
        """Open a slot for a sequence that begins with a prefix, with room for its next `count` tokens.

        False: one kind of blocks is short where all together would do; nothing has changed.
        """
        sequence.kv.slot = slot = self.ledger.open()
        try:
            if sequence.request.reserved_tokens is not None:
                self.ledger.reserve(slot, sequence.request.reserved_tokens)
            self.prefixes.adopt(sequence, prefix, count)
            self.ledger.append([slot], [count])
        except OutOfBlocksError:
            self.ledger.close(slot)
            return False
        return True

    def _resume_next(self) -> None:
        """Let swapped sequences go on that are next in turn, before rounds: one of theirs may be due."""
        while self.waiting and self._budget.is_open(self.running):
            sequence = next(iter(self._admission_order.candidates(self.running)), None)
            if sequence is None or not self._resume(sequence):
                return

    def _resume(self, sequence: Sequence) -> bool:
        """Let a swapped sequence go on if it fits. Returns False if nothing was done; without its copy it waits on."""
        if sequence.kv.host_id is None:
            return False
        # Beside others, no sooner than there is room for what all need soon.
        if not self._preemption.fits(sequence) or (
            self.running and self._budget.lacking(sequence, self.running) > 0
        ):
            self._budget.hold_back()
            return False
        if self._preemption.resume(sequence):
            self.waiting.remove(sequence)
            self.running.enter(sequence)
        return True

    def record_copies(self, nbytes: int, out: float, back: float) -> None:
        """Record the seconds that copies of `nbytes` to the host and back took."""
        self._preemption.record_copies(nbytes, out, back)

    def record_step(self, step: ScheduledStep, seconds: float) -> None:
        """Record the time of a step."""
        self.decisions.record(step.plan, seconds)
        self._preemption.record_step(step.plan, step.sequences, seconds)

    def advance(
        self, step: ScheduledStep, offsets: SequenceType[int] | None = None, kept: IntArray | None = None
    ) -> None:
        """Count the planned tokens as computed, and take those back that were proposed and not sampled.

        Args:
            offsets: where the tokens of each sampler begin; None: each has one.
            kept: see `StepResult`.
        """
        self._rounds.note(step, kept)
        lengths = {} if offsets is None else dict(zip(step.samplers, np.diff(offsets).tolist(), strict=True))
        rejected: dict[int, int] = {}
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            if sequence.finished:  # since the step was submitted
                continue
            if entry.replay is not None:
                sequence.kv.replayed += entry.count
                continue
            accepted = lengths.get(sequence, 1) - 1
            if entry.num_drafts:
                self.drafts.count(entry.num_drafts, accepted)
                if accepted < entry.num_drafts:
                    rejected[entry.slot] = entry.num_drafts - accepted
            known = entry.count - entry.num_drafts
            sequence.kv.num_computed = end = entry.start + known + accepted
            self.prefixes.remember(sequence, entry.start, end, entry.token_ids[known : known + accepted])
        if rejected:
            self.ledger.take_back(list(rejected), list(rejected.values()))
        counts: Counter[TenantName] = Counter()
        for sequence in step.samplers:
            if not sequence.finished:
                counts[sequence.request.tenant] += lengths.get(sequence, 1)
        for tenant, count in counts.items():
            self._charge(tenant, 0, count)

    def _charge(self, tenant: TenantName, prompt_tokens: int, output_tokens: int) -> None:
        """Put tokens on a tenant's account."""
        self.accounts.charge(tenant, prompt_tokens, output_tokens)
        self.waiting.order.charge(tenant, prompt_tokens, output_tokens)
