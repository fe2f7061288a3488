"""WHEN: which sequences take part in a step, and with how many tokens.

Decodes come first, then the prefill chunks of running prompts, then new requests in order of arrival, until the step's
token budget is spent. Nothing here knows a model: the simulator runs the same object with a virtual clock.
"""

from collections import deque
from collections.abc import Callable, Iterable

from winnow.cache import BlockCopies
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.engine.preemption import NewestFirst, PreemptionMethod, Recompute, VictimPolicy
from winnow.engine.request import Request, Sequence


class Scheduler:
    """First come, first served, on a token budget.

    Attributes:
        waiting: sequences without a slot, oldest first.
        running: sequences with a slot, in the order in which they were admitted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: Executor,
        clock: Callable[[], float],
        victims: VictimPolicy | None = None,
        method: PreemptionMethod | None = None,
    ) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._config = config
        self._executor = executor
        self._cache = executor.cache
        self._clock = clock
        self._victims = victims or NewestFirst()
        self._method = method or Recompute()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request.sequences[0])

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence, running or waiting, and give back what it holds."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.slot is not None:
            self._cache.close(sequence.slot)
            self._executor.release(sequence.slot)
            sequence.slot = None
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> StepPlan:
        """Plan the next step and take the blocks that it needs. The plan is empty only if nothing is unfinished."""
        while True:
            plan = self._plan()
            if plan.entries or not self.has_unfinished:
                return plan
            # Only prompts in progress are left, and together they hold all blocks: the newest gives way.
            self._preempt()

    def _plan(self) -> StepPlan:
        self._make_room_for_decodes()
        copies: list[BlockCopies] = []
        budget = self._config.max_num_batched_tokens
        decodes = [sequence for sequence in self.running if sequence.is_decoding][:budget]
        entries = self._append(decodes, 1, copies)
        budget -= len(decodes)
        for sequence in [s for s in self.running if not s.is_decoding]:
            count = self._chunk(sequence, budget)
            if not count:
                break
            if self._cache.can_append([_slot(sequence)], [count]):
                entries += self._append([sequence], count, copies)
                budget -= count
        while first := self._admit(budget):
            entries += self._append([self.running[-1]], first, copies)
            budget -= first
        # A fork's tail is shared from now on, so forks are made when all of the step's blocks are taken.
        return StepPlan(tuple(self._with_samplers(entries)), tuple(copies))

    def _make_room_for_decodes(self) -> None:
        """Preempt until every decoding sequence can take one more KV a row."""
        while True:
            slots = [_slot(sequence) for sequence in self.running if sequence.is_decoding]
            if not slots or self._cache.can_append(slots, [1] * len(slots)):
                return
            self._preempt()

    def _append(
        self, sequences: list[Sequence], count: int, copies: list[BlockCopies]
    ) -> list[PlannedSequence]:
        """Take room for `count` tokens of each sequence."""
        if not sequences:
            return []
        copy = self._cache.append([_slot(s) for s in sequences], [count] * len(sequences))
        if copy is not None:
            copies.append(copy)
        return [PlannedSequence(s, _slot(s), s.num_computed, count, ()) for s in sequences]

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt that this step computes; 0 if it must wait for a step with more room."""
        if self._config.prefill_chunk is None:
            # Whole prompts: one that is larger than any budget goes alone.
            whole = sequence.num_to_compute
            return whole if whole <= budget or budget == self._config.max_num_batched_tokens else 0
        return min(sequence.num_to_compute, self._config.prefill_chunk, budget)

    def _admit(self, budget: int) -> int:
        """Start the oldest waiting sequence if it fits. Returns the tokens it computes in this step, or 0."""
        if not self.waiting or not self._cache.can_open(self.waiting[0].num_tokens):
            return 0
        sequence = self.waiting[0]
        count = self._chunk(sequence, budget)
        if not count or not self._room_for(sequence):
            return 0
        self.waiting.popleft()
        sequence.slot = self._cache.open()
        if sequence.request.metrics.first_scheduled_time is None:
            sequence.request.metrics.first_scheduled_time = self._clock()
        self.running.append(sequence)
        return count

    def _room_for(self, newcomer: Sequence) -> bool:
        """Whether all tokens of `newcomer` fit beside those already promised room.

        Prompts in progress will take the rest of their blocks, and each running sequence may soon need another block
        in every row; admitting into that room would only mean preempting right after.
        """
        layout = self._cache.layout
        promised = sum(
            layout.blocks_for(s.num_tokens) - self._cache.blocks_held(_slot(s))
            for s in self.running
            if not s.is_decoding
        )
        headroom = layout.rows_per_seq * len(self.running)
        return layout.blocks_for(newcomer.num_tokens) + promised + headroom <= self._cache.allocator.num_free

    def _with_samplers(self, entries: list[PlannedSequence]) -> Iterable[PlannedSequence]:
        """Add who samples to the entries that compute their sequence's last token."""
        for entry in entries:
            sequence = entry.sequence
            if entry.end < sequence.num_tokens:
                yield entry
                continue
            forks, sequence.forks = sequence.forks, []
            started = [fork for fork in forks if self._fork(sequence, fork)]
            # Those that find no slot now compute the prompt themselves later.
            self.waiting.extendleft(reversed(forks[len(started) :]))
            yield PlannedSequence(sequence, entry.slot, entry.start, entry.count, (sequence, *started))

    def _fork(self, parent: Sequence, child: Sequence) -> bool:
        if not self._cache.can_fork(_slot(parent)):
            return False
        child.slot = self._cache.fork(_slot(parent))
        child.num_computed = parent.num_computed
        self.running.append(child)
        return True

    def _preempt(self) -> None:
        victim = self._victims.choose(self.running)
        self._put_back(victim, self._method)
        victim.request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _put_back(self, sequence: Sequence, method: PreemptionMethod) -> None:
        method.preempt(sequence, self._executor)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def abandon(self, plan: StepPlan) -> None:
        """Undo a plan that was not computed to its end: its sequences start anew, their half-written KVs are gone."""
        planned = {sequence for entry in plan.entries for sequence in (entry.sequence, *entry.samplers)}
        for sequence in [s for s in reversed(self.running) if s in planned]:
            self._put_back(sequence, Recompute())

    def advance(self, plan: StepPlan) -> None:
        """Count the planned tokens as computed."""
        for entry in plan.entries:
            entry.sequence.num_computed = entry.end
            for sequence in entry.samplers:
                sequence.num_computed = entry.end


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None, "only a running sequence has a slot"
    return sequence.slot
