"""WHEN: which sequences take part in a step, and with how many tokens.

Decodes come first, then the prefill chunks of running prompts, then new requests by priority and arrival, until the
step's token budget is spent. Nothing here knows a model: the simulator runs the same object with a virtual clock.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceType

import numpy as np

from winnow.cache import Demand, OutOfBlocksError
from winnow.cache.layout import IntArray
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.admission_order import AdmissionOrder
from winnow.engine.scheduling.drafts import Drafts, DraftSource
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.engine.scheduling.forks import Forks
from winnow.engine.scheduling.lookahead import Lookahead
from winnow.engine.scheduling.orders import build_order
from winnow.engine.scheduling.payoff import CompressionDecisions
from winnow.engine.scheduling.plan_builder import ScheduledStep, build_plan
from winnow.engine.scheduling.queue import WaitingQueue
from winnow.engine.scheduling.replays import drop_finished, replaying
from winnow.engine.scheduling.running import Running
from winnow.engine.scheduling.victims import LeastLoss, VictimPolicy
from winnow.values.tenants import TenantName


class Scheduler:
    """Scheduler of sequences as they are queued, on a token budget.

    Attributes:
        memory: who holds which KVs, and where; the executor follows its ledger.
        waiting: sequences without a slot.
        running: sequences with a slot, in the order in which they were admitted.
        rounds: rounds of eviction.
        forks: sequences that start from the KVs of others.
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
        memory: Memory | None = None,
        victims: VictimPolicy | None = None,
        max_round_kvs: int | None = None,
        draft_source: DraftSource | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._prefetching: list[Sequence] = []
        self.memory = memory = memory or Memory(executor, clock, config)
        self.ledger = memory.ledger
        self._executor = executor
        self.drafts = Drafts(config.speculative_config, executor.layout, draft_source)
        self.waiting = WaitingQueue(build_order(config))
        self.accounts = TenantAccounts(
            memory.tenants, memory.ledger, memory.swap.host_bytes, self.waiting.order
        )
        victims = victims or LeastLoss(memory.swap, self.waiting.order)
        self.running = Running(memory, self.waiting, victims, self.accounts)
        self.rounds = EvictionScheduler(executor, memory, clock, max_round_kvs, self.running, config)
        self.lookahead = Lookahead(memory.ledger, self.running, self.waiting, self.accounts, self.rounds)
        self.forks = Forks(memory, executor, clock, self.running, self.waiting)
        self.decisions = CompressionDecisions(memory, self.rounds.total)
        self._order = AdmissionOrder(self.waiting, self.accounts, memory, config)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        self.memory.sessions.begin(request)
        self.memory.prefixes.prefetch(request.sequences[0])
        if request.session is not None and request.session.prefetch:
            self._prefetching.append(request.sequences[0])

    def schedule(self) -> ScheduledStep:
        """Plan the next step and take the blocks that it needs. The plan is empty only if nothing is unfinished."""
        try:
            return self._schedule()
        except BaseException:
            # Rows may have room for tokens that are not computed, or half a round behind them.
            self.running.recompute_all()
            raise

    def _schedule(self) -> ScheduledStep:
        memory, rounds = self.memory, self.rounds
        memory.start_step(idle=not self.running)
        rounds.start_step()
        self._order.keep_limits(self.running)
        while True:
            if self._prefetching:
                self._prefetching = [s for s in self._prefetching if not self._end_prefetch(s)]
            self._resume_next()
            drop_finished(memory, self.running)
            self.ledger.drop_unseen([s.kv.running_slot for s in self.running if s.slides(self.ledger.layout)])
            rounds.unshare_samples(budgets_differ=True)
            waits = rounds.evict_due()
            rounds.unshare_samples(budgets_differ=False)
            rounds.own_before_change()  # after rounds, of which the index may hold what they left
            if self.waiting:
                rounds.make_room_for(self._order.candidates, self.decisions.allows)
            urgent = self._order.make_way(self.running)
            if any([self._resume(sequence) for sequence in urgent]):
                continue  # a round of theirs may be due
            step = self._plan(waits | replaying(self.ledger, self.running)[0], urgent)
            if step.sequences or not self.has_unfinished:
                return rounds.foresee(step)
            if memory.files.await_any(self.waiting) or waits or rounds.evict_under_pressure():
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
        self.memory.append(chunks)
        planned += chunks
        self.memory.prefixes.note_wanted(self.waiting)
        while first := self._admit_next(budget):
            planned.append((self.running[-1], first))
            budget -= first
        return build_plan(self.memory, self.running, self.waiting, planned, drafts)

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
            if proposes and self.drafts.read_cache(len(decoding)):
                self._executor.apply(self.ledger.take_update())
            drafts = self.drafts.propose(decoding, most - len(decoding)) if proposes else {}
            planned = [(s, 1 + len(drafts[s]) if s in drafts else 1) for s in decoding]
            try:
                self.memory.append(planned)
                return planned, drafts
            except OutOfBlocksError:
                proposes = False
                if not drafts and not self.rounds.evict_under_pressure():
                    self.running.preempt()

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Return tokens of a prompt that this step computes; 0 if it must wait for a step with more room."""
        chunk = self._config.prefill_chunk
        if (replay := sequence.next_pass) is not None:  # what it begins with is compressed once more
            return max(min(replay.length, budget, chunk or budget), 0)
        most, wanted = max(budget, 0), sequence.num_to_compute  # a whole prompt may have overdrawn the budget
        if chunk is not None:
            most = min(budget, chunk)
        elif budget == self._config.max_num_batched_tokens:
            most = wanted  # whole prompts: one that is larger than any budget goes alone
        wanted = min(wanted, self.memory.prefixes.until_state(sequence))
        if sequence.forks:
            wanted = min(wanted, sequence.request.fork_at - sequence.kv.num_computed)
        eviction = sequence.eviction
        if eviction is not None:
            kvs = 0.0 if sequence.kv.slot is None else self.rounds.mean_kvs(sequence)
            wanted = eviction.chunk(sequence.kv.num_computed, sequence.kv.last_round, kvs, wanted, most)
        if chunk is None:
            return wanted if wanted <= most else 0
        return min(wanted, most)

    def _admit_next(self, budget: int) -> int:
        """Start the next waiting sequence that may enter. Returns the tokens it computes in this step, or 0."""
        if not self.waiting or not self.memory.room.is_open(self.running):
            return 0
        passed: list[Sequence] = []
        for sequence in self._order.candidates(self.running):
            if count := self._start(sequence, budget):
                for each in passed:
                    each.times_overtaken += 1
                return count
            passed.append(sequence)
        return 0

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Start a waiting sequence if it fits. Returns the tokens that it computes in this step, or 0."""
        if sequence.kv.host_id is not None or sequence in self._prefetching:
            return 0  # a swapped one resumes before the next step is planned
        self.decisions.note_start(sequence, self.waiting, self.running)
        count = self.memory.take(sequence, self.running, lambda: self._chunk(sequence, budget))
        if not count:
            return 0
        self.waiting.remove(sequence)
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.update_metrics(first_scheduled_time=self._clock())
            self.accounts.charge(sequence.request.tenant, sequence.prompt_len - sequence.kv.num_computed, 0)
        self.running.enter(sequence)
        self.decisions.started(sequence)
        return count

    def _end_prefetch(self, sequence: Sequence) -> bool:
        """End a sequence that generates nothing, once what it asks for is there. False: it still waits."""
        if not sequence.finished and self.memory.prefetch(sequence):
            self.running.end_unstarted(sequence)
        return sequence.finished

    def _resume_next(self) -> None:
        """Let swapped sequences go on that are next in turn, before rounds: one of theirs may be due."""
        while self.waiting and self.memory.room.is_open(self.running):
            sequence = next(iter(self._order.candidates(self.running)), None)
            if sequence is None or not self._resume(sequence):
                return

    def _resume(self, sequence: Sequence) -> bool:
        """Resume a swapped sequence if it fits. Returns False if nothing was done; without its copy it stays queued."""
        if sequence.kv.host_id is None or not self.memory.bring_back(sequence, self.running):
            return False
        if sequence.kv.slot is not None:
            self.waiting.remove(sequence)
            self.running.enter(sequence)
        return True

    def record_step(
        self, step: ScheduledStep, seconds: float, num_tokens: int | None = None, period: float | None = None
    ) -> None:
        """Record the time of a step.

        Args:
            num_tokens: what it added to answers; None: one for each sampler.
            period: seconds since the end of the step before it; None: as many as it took.
        """
        tokens = len(step.samplers) if num_tokens is None else num_tokens
        self.drafts.record(step.plan, tokens, seconds if period is None else period)
        self.decisions.record(step.plan, seconds)
        self.memory.swap.record_step(step.plan, step.sequences, seconds)

    def advance(
        self, step: ScheduledStep, offsets: SequenceType[int] | None = None, kept: IntArray | None = None
    ) -> None:
        """Count the planned tokens as computed, and take those back that were proposed and not sampled.

        Args:
            offsets: where the tokens of each sampler begin; None: each has one.
            kept: see `StepResult`.
        """
        self.rounds.note(step, kept)
        lengths = {} if offsets is None else dict(zip(step.samplers, np.diff(offsets).tolist(), strict=True))
        rejected: dict[int, int] = {}
        computed = []
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True):
            if sequence.finished:  # since the step was submitted
                continue
            if entry.replay is not None:
                sequence.kv.replayed += entry.count
                continue
            accepted = lengths.get(sequence, 1) - 1
            if entry.num_drafts:
                self.drafts.count(sequence, entry.num_drafts, accepted)
                if accepted < entry.num_drafts:
                    rejected[entry.slot] = entry.num_drafts - accepted
                    if self.ledger.layout.state_bytes:  # a state has no tokens: all are computed again
                        rejected[entry.slot] = entry.count
                        self.drafts.again += accepted + 1
            known = entry.count - entry.num_drafts
            sequence.kv.num_computed = end = entry.end - rejected.get(entry.slot, 0)
            computed.append((sequence, entry.start, end, entry.token_ids[known : end - entry.start]))
        if rejected:
            self.ledger.take_back(list(rejected), list(rejected.values()))
        for each in computed:  # after it: where rows slide, what they hold says which tokens these are
            self.memory.prefixes.remember(*each)
        counts: Counter[TenantName] = Counter()
        for sequence in step.samplers:
            if not sequence.finished:
                counts[sequence.request.tenant] += lengths.get(sequence, 1)
        for tenant, count in counts.items():
            self.accounts.charge(tenant, 0, count)
