"""Which sequences take part in a step, and with how many tokens.

Decodes come first, then the prefill chunks of running prompts, then new requests by priority and arrival, until the
step's token budget is spent. Nothing here knows a model: the simulator runs the same object with a virtual clock.
"""

from collections.abc import Callable

from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.plan import LAST_SAMPLED, ONE_EACH, PlannedSequence, StepPlan, StepResult
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.accounts import TenantAccounts
from winnow.engine.scheduling.admission_order import AdmissionOrder
from winnow.engine.scheduling.drafts import Drafts, DraftSource
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow.engine.scheduling.first_token import FirstTokens
from winnow.engine.scheduling.payoff import CompressionDecisions
from winnow.engine.scheduling.plan_builder import ScheduledStep, advance, build_plan, new_sequence
from winnow.engine.scheduling.queue import WaitingQueue, build_order
from winnow.engine.scheduling.running import Running


class Scheduler:
    """Scheduler of sequences as they are queued, on a token budget; those `running` have slots."""

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        clock: Callable[[], float],
        memory: Memory,
        max_round_kvs: int | None = None,
        draft_source: DraftSource | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self.memory = memory
        self.ledger = memory.ledger
        self._executor = executor
        self.drafts = Drafts(config.speculative_config, executor.layout, draft_source)
        self.waiting = WaitingQueue(build_order(config))
        self.accounts = TenantAccounts(memory, self.waiting.order)
        self.running = Running(memory, self.waiting, self.accounts)
        self.rounds = EvictionScheduler(executor, memory, clock, max_round_kvs, self.running, config)
        self.first_tokens = FirstTokens(memory, self.waiting, self.running)
        self.decisions = CompressionDecisions(memory, self.rounds.total)
        # Sequences whose pictures cannot be computed, and why.
        self._failed: dict[Sequence, str] = {}
        # Else blocks leave, or values move, in every step.
        layout = executor.layout
        tier = layout.value_tier is not None
        below = config.watermark_preempt < 1.0
        self._is_regular = not (layout.has_windows or tier or self.accounts.has_quotas or below)
        self._order = AdmissionOrder(self.waiting, self.accounts, memory, config)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.add(request)
        self.memory.prefixes.prefetch(request.sequences[0])

    def fork(self, parent: Sequence, request: Request) -> None:
        """Start a request of one sequence that continues, between two steps, from what `parent` has computed so far. It
        computes its tokens itself, later, where `parent` has no slot or there is none for it."""
        [child] = request.sequences
        self.waiting.add(request)
        slot = parent.kv.slot
        if slot is None or not self.memory.fork(parent, child):
            return
        child.prefix = None if parent.prefix is None else parent.prefix.fork()
        self.running.enter(child, announced=True)
        self.memory.apply_update()
        self._executor.fork(slot, new_sequence(child))
        self.waiting.remove(child)
        parent.request.forked = request.forked = True
        request.num_cached_tokens = min(child.kv.num_computed, child.prompt_len)
        request.update_metrics(first_scheduled_time=self._clock())

    def schedule(self) -> ScheduledStep:
        """Plan the next step and take its blocks; empty if nothing is unfinished, or pictures are awaited or failed."""
        try:
            return self._schedule()
        except BaseException:
            # Rows may have room for tokens that are not computed, or half a round behind them.
            self.running.recompute_all()
            raise

    def plan_following(self, step: ScheduledStep) -> ScheduledStep | None:
        """Plan the step after one in progress, so that a device need not wait, and take the blocks that it needs.

        All that runs decodes in it, as in `step`, and nothing else can happen. A sequence may end with a token that is
        not known yet: then one more of it is computed, and dropped. None: it has to wait for results.
        """
        update = step.plan.update
        # Should `step` fail, only the update after it is said again: it has lost nothing if all it did was to grow.
        if not self._is_regular or self.waiting or update.closed or update.copies:
            return None
        pairs = zip(step.plan.entries, step.sequences, strict=True)
        continuing = [(entry, sequence) for entry, sequence in pairs if not sequence.finished]
        if len(continuing) < max(len(self.running), 1) or not all(
            _decodes_next(*each) for each in continuing
        ):
            return None
        if self.rounds.may_follow([(sequence, entry.end) for entry, sequence in continuing]):
            return None
        if not self.memory.append([(sequence, 1) for _, sequence in continuing]):
            return None
        entries = tuple(
            PlannedSequence(entry.slot, entry.end, [LAST_SAMPLED], (entry.slot,)) for entry, _ in continuing
        )
        sequences = tuple(sequence for _, sequence in continuing)
        following = ScheduledStep(StepPlan(entries, self.memory.take_update()), sequences, sequences)
        return self.rounds.foresee(following)

    def _schedule(self) -> ScheduledStep:
        memory, rounds = self.memory, self.rounds
        memory.start_step(idle=not self.running)
        rounds.start_step()
        self._order.keep_limits(self.running)
        while self._failed:
            sequence, error = self._failed.popitem()
            self.running.fail(sequence.request.sequences, error)
        gave_way = False
        while True:
            if not gave_way or not self.running:  # else who gave way would come back at once, again and again
                self._resume_next()
            self.running.drop_finished_passes()
            memory.drop_unseen(self.running)
            rounds.unshare_samples(budgets_differ=True)
            waits = rounds.evict_due()
            rounds.unshare_samples(budgets_differ=False)
            rounds.own_before_change()  # after rounds, of which the index may hold what they left
            if self.waiting:
                rounds.make_room_for(self._order.candidates, self.decisions.allows)
            urgent = self._order.make_way(self.running)
            if any([self._resume(sequence) for sequence in urgent]):
                continue  # a round of theirs may be due
            step = self._plan(waits | self.running.replaying()[0], urgent)
            if step.sequences or not self.has_unfinished:
                return rounds.foresee(step)
            if self._executor.tower.wait() or self._failed:
                return step
            if memory.files.await_any(self.waiting) or waits or rounds.evict_under_pressure():
                continue
            # Only prompts in progress are left, and together they hold all blocks: one gives way.
            self.running.preempt()
            gave_way = True

    def _plan(self, waits: set[Sequence], urgent: list[Sequence]) -> ScheduledStep:
        """Plan the sequences that need not wait for a round, and passes of the replays that come before one. Waiting
        sequences that are `urgent` start before prompts in progress continue."""
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
        missing = self.running.replaying()[1] if waits else {}
        for sequence in rest:
            if sequence in missing:
                count = min(missing[sequence], budget, self._config.prefill_chunk or budget)
            elif sequence.is_decoding or sequence in waits or not sequence.num_to_compute:
                continue
            else:
                count = self._next_chunk(sequence, budget)
            if not count:
                if sequence.awaits_tower:
                    continue
                break
            if self.memory.append([(sequence, count)]):
                planned.append((sequence, count))
                budget -= count
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
                self.memory.apply_update()
            drafts = self.drafts.propose(decoding, most - len(decoding)) if proposes else {}
            planned = [(s, 1 + len(drafts[s]) if s in drafts else 1) for s in decoding]
            if self.memory.append(planned, below_threshold=len(self.running) > 1):
                return planned, drafts
            proposes = False
            if not drafts and not self.rounds.evict_under_pressure():
                self.running.preempt()

    def _admit_next(self, budget: int) -> int:
        """Start the next waiting sequence that may enter. Returns the tokens it computes in this step, or 0."""
        if not self.waiting or not self.memory.is_open(self.running):
            return 0
        starts = (self._start(sequence, budget) for sequence in self._order.candidates(self.running))
        return next(filter(None, starts), 0)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Start a waiting sequence if it fits. Returns the tokens that it computes in this step, or 0."""
        if sequence.kv.host_id is not None:
            return 0  # a swapped one resumes before the next step is planned
        self.decisions.note_start(sequence, self.waiting, self.running)
        count = self.memory.take(sequence, self.running, lambda: self._next_chunk(sequence, budget))
        if not count:
            return 0
        self.waiting.remove(sequence)
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.update_metrics(first_scheduled_time=self._clock())
            self.accounts.charge(sequence.request.tenant, sequence.prompt_len - sequence.kv.num_computed, 0)
        self.running.enter(sequence)
        self.decisions.started(sequence)
        return count

    def _next_chunk(self, sequence: Sequence, budget: int) -> int:
        """Return tokens for a step of `budget` tokens; 0: it waits, for room or for its pictures."""
        count = self._chunk(sequence, budget)
        images, start = sequence.request.images, sequence.kv.num_computed
        if not images:
            return count
        ready = sequence not in self._failed and self._executor.tower.ready(images, start, start + count)
        sequence.awaits_tower = ready is not True
        if isinstance(ready, str):
            self._failed[sequence] = f"image cannot be computed: {ready}"
        return count if ready is True else 0

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        chunk, start = self._config.prefill_chunk, sequence.kv.num_computed
        if (replay := sequence.next_pass) is not None:  # what it begins with is compressed once more
            return max(min(replay.length, budget, chunk or budget), 0)
        if self._config.batch_invariant and chunk is not None and sequence.eviction is None:
            # What an answer has computed token by token is computed so again; else the next cut is a multiple.
            end = max(min(start - start % chunk + chunk, sequence.prompt_len), start + 1)
            end = sequence.request.uncut(start, end)
            return end - start if end - start <= budget else 0
        most, wanted = max(budget, 0), sequence.num_to_compute  # a whole prompt may have overdrawn the budget
        if chunk is not None:
            most = min(budget, chunk)
        elif budget == self._config.max_num_batched_tokens:
            most = wanted  # whole prompts: one that is larger than any budget goes alone
        if sequence.runs:
            most = self.memory.spans.stretch(sequence, start, most)
        wanted = min(wanted, self.memory.until_stop(sequence))
        if sequence.forks:
            wanted = min(wanted, sequence.request.fork_at - start)
        if (eviction := sequence.eviction) is not None:
            kvs = 0.0 if sequence.kv.slot is None else self.memory.mean_kvs([sequence])[0]
            wanted = eviction.chunk(start, sequence.kv.last_round, kvs, wanted, most)
        if chunk is None and wanted > most:
            return 0
        return sequence.request.uncut(start, start + min(wanted, most)) - start

    def _resume_next(self) -> None:
        """Let swapped sequences go on that are next in turn, before rounds: one of theirs may be due."""
        while self.waiting and self.memory.is_open(self.running):
            first = next(iter(self._order.candidates(self.running)), None)
            if first is None or not self._resume(first):
                return

    def _resume(self, sequence: Sequence) -> bool:
        """Resume a swapped sequence if it fits. Returns False if nothing was done; without its copy it stays queued."""
        if sequence.kv.host_id is None or not self.memory.bring_back(sequence, self.running):
            return False
        if sequence.kv.slot is not None:
            self.waiting.remove(sequence)
            self.running.enter(sequence)
        return True

    def advance(
        self,
        step: ScheduledStep,
        result: StepResult = ONE_EACH,
        seconds: float | None = None,
        period: float | None = None,
    ) -> None:
        """Count the planned tokens as computed, and take those back that were proposed and not sampled. What steps cost
        is learnt of the `seconds` that it took, and of the `period` since the end of the one before."""
        self.rounds.note(step, result.kept)
        advance(step, result.offsets, self.memory, self.drafts, self.accounts)
        if seconds is not None and not any(each.request.expected for each in step.sequences[:1]):
            self.first_tokens.note_step(seconds if period is None else period)
            tokens = result.offsets[-1] if result.offsets else len(step.samplers)
            self.drafts.record(step.plan, tokens, seconds if period is None else period)
            self.decisions.record(step.plan, seconds)
            self.memory.swap.record_step(step.plan, step.sequences, seconds)


def _decodes_next(entry: PlannedSequence, sequence: Sequence) -> bool:
    """Return whether a sequence computes the token that it samples in this step, whichever that is."""
    request = sequence.request
    return (
        entry.samplers == (entry.slot,)
        # Not where it continues from what rounds of a session left.
        and not (sequence.eviction is None and sequence.kv.last_round)
        and request.observer is None
        and request.params.structured_outputs is None  # the form leads the next token by this one
        and not request.params.bad_words  # and so may a word's beginning
        and sequence.num_output_tokens + 1 < request.max_tokens
    )
