"""When KVs are taken: which sequences shrink before a step, so that what they free is there for the same step."""

import sys
from collections.abc import Callable, Iterator, Sequence as SequenceType
from dataclasses import replace

from winnow.cache.layout import IntArray
from winnow.config import SchedulerConfig
from winnow.engine.executor import Executor
from winnow.engine.memory.memory import Memory
from winnow.engine.plan import PlannedEviction
from winnow.engine.requests.request import RoundTally, Sequence
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.running import Running
from winnow.eviction import LATE_STEPS, SequenceEviction


class EvictionScheduler:
    """Scheduler of rounds: it chooses the sequences of a round, and keeps the books of each.

    A round ranks at most `max_kvs` KVs, over all layers and heads. Who has waited longest since its last round goes
    first, and at least one goes, however large: none starves.
    """

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        clock: Callable[[], float],
        max_kvs: int | None,
        running: Running,
        config: SchedulerConfig,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._running = running
        self._memory = memory
        self._max_kvs = max_kvs
        self._chunk = sys.maxsize if config.prefill_chunk is None else config.prefill_chunk
        self.total = RoundTally()
        self._num_steps = 0
        self._num_served = 0
        self._foreseen: tuple[tuple[Sequence, ...], tuple[PlannedEviction, ...], IntArray] | None = None

    def start_step(self) -> None:
        self._num_steps += 1

    def evict_due(self) -> set[Sequence]:
        """Run one round over sequences that must wait for it. Returns those that found no place, and still wait."""
        able = [s for s in self._running if s.eviction is not None]
        at_intervals = self._due_at_intervals(able)
        due = [
            s
            for s, state in self._states(able)
            if (_eviction(s).round_due(*state) or s in at_intervals) and s.next_pass is None
        ]
        done = self._evict(due + self._joining(due, able))
        # A sibling that a round served through its leader is no longer due.
        return {s for s in due if s not in done and s.kv.last_round != s.kv.num_computed}

    def unshare_samples(self, *, budgets_differ: bool) -> None:
        """Unshare the blocks of a prompt's samples, if each sample is evicted on its own. Those with different budgets
        part before the round, the others after it: then there is less to copy."""
        for sequence in self._memory.sharing(self._running):
            differ = len(sequence.request.evictions) > 1
            parted = sequence.kv.num_computed >= sequence.request.fork_at
            if sequence.owns_blocks and differ == budgets_differ and parted:
                self._running.own(sequence)

    def own_before_change(self) -> None:
        """Unshare blocks of sequences before a query or a replay adds to accumulators in them."""
        for sequence in self._memory.sharing(self._running):
            if self._memory.prefixes.is_about_to_change(sequence, self._chunk):
                self._running.own(sequence)

    def evict_under_pressure(self) -> bool:
        """Evict from sequences whose policy acts under pressure. Returns False if none can shrink."""
        able = [s for s in self._running if s.eviction is not None and s.eviction.policy.when.pressure]
        late = any(_eviction(s).policy.when.late for s in able)
        for step in (*LATE_STEPS, None) if late else ():
            if self._evict(self._shrinkable(able, step), step):
                return True
        return bool(self._evict(self._shrinkable(able, urgent=True)))

    def make_room_for(
        self, candidates: Callable[[Running], SequenceType[Sequence]], allows: Callable[[Sequence], bool]
    ) -> None:
        """Compress what runs for the first of the waiting `candidates`, where policies allow that and it would be
        admitted. `allows` says whether compressing a running one pays."""
        able = [s for s in self._running if s.eviction is not None and s.eviction.policy.when.make_room]
        able = [s for s in self._shrinkable(able) if allows(s)]
        first = next(iter(candidates(self._running)), None) if able else None
        if first is None or not self._memory.can_open(first):
            return
        lacking = self._memory.lacking(first, self._running)
        for step in (*LATE_STEPS, None) if lacking > 0 else ():
            if sum(self._memory.yields(s, at_step(s, step)) for s in able) >= lacking:
                self._evict(self._shrinkable(able, step), step)
                return

    def may_follow(self, step: SequenceType[tuple[Sequence, int]]) -> bool:
        """Return whether anything that policies ask for may come between a step and the next. `step` has sequences,
        whose rows have room for its tokens, and their tokens computed at its end."""
        able = [(sequence, end) for sequence, end in step if sequence.eviction is not None]
        states = self._states([sequence for sequence, _ in able])
        for (sequence, (_, last_round, mean)), (_, end) in zip(states, able, strict=True):
            eviction = _eviction(sequence)
            when = eviction.policy.when
            if when.every_steps or when.uncompressed_tokens or eviction.round_due(end, last_round, mean):
                return True
            if eviction.passes and end == eviction.context_len:
                return True
            owns = sequence.owns_blocks or eviction.may_observe(end, 1)
            if owns and any(self._memory.sharing([sequence])):
                return True
        return False

    def foresee(self, step: ScheduledStep) -> ScheduledStep:
        """Return a step with the round that its tokens make due, if its sequences are known in advance and it helps."""
        if not self._executor.overlaps:
            return step
        ends = {s: e.end for e, s in zip(step.plan.entries, step.sequences, strict=True) if e.replay is None}
        able = [sequence for sequence in ends if sequence.eviction is not None]
        due = [
            sequence
            for sequence, (_, last_round, mean) in self._states(able)
            if _eviction(sequence).round_due(ends[sequence], last_round, mean)
        ]
        due.sort(key=lambda s: s.kv.last_served)
        if not due or any(_eviction(s).passes for s in due) or any(self._memory.sharing(due)):
            return step
        if self._max_kvs is not None and sum(map(self._memory.num_evictable, due)) > self._max_kvs:
            return step
        evictions = tuple(PlannedEviction(s.kv.running_slot, ends[s], _asked(s, None, ends[s])) for s in due)
        return replace(step, plan=replace(step.plan, evictions=evictions), evicting=tuple(due))

    def note(self, step: ScheduledStep, kept: IntArray | None) -> None:
        self._foreseen = None if kept is None else (step.evicting, step.plan.evictions, kept)

    def _states(self, sequences: SequenceType[Sequence]) -> Iterator[tuple[Sequence, tuple[int, int, float]]]:
        """Yield each sequence with what its policy must know: tokens computed, those at its last round, KVs per row."""
        if not sequences:
            return
        for sequence, mean in zip(sequences, self._memory.mean_kvs(sequences), strict=True):
            yield sequence, (sequence.kv.num_computed, sequence.kv.last_round, mean)

    def _shrinkable(
        self, sequences: SequenceType[Sequence], step: float | None = None, *, urgent: bool = False
    ) -> list[Sequence]:
        """Return those for which a round that the engine asks for would bring anything."""
        able = [
            s for s, state in self._states(sequences) if at_step(s, step).may_shrink(*state, urgent=urgent)
        ]

        def frees(sequence: Sequence) -> bool:  # of what others hold too, a round makes copies
            left = at_step(sequence, step).blocks_after(self._memory.layout, sequence.num_tokens)
            return self._memory.freed(sequence) > left

        return [s for s in able if not _eviction(s).policy.when.late or frees(s)]

    def _due_at_intervals(self, able: SequenceType[Sequence]) -> set[Sequence]:
        """Return sequences whose policies have rounds by steps of the engine, or by what all have gathered."""
        whens = [(s, _eviction(s).policy.when) for s in able if s.is_decoding]
        stepped = [s for s, when in whens if when.every_steps and self._num_steps % when.every_steps == 0]
        due = set(self._shrinkable(stepped))
        watched = self._shrinkable([s for s, when in whens if when.uncompressed_tokens is not None])
        gathered = sum(s.kv.num_computed - s.kv.last_round for s in watched)
        for sequence in watched:
            if gathered >= (_eviction(sequence).policy.when.uncompressed_tokens or 0):
                due.add(sequence)
        return due

    def _joining(self, due: SequenceType[Sequence], able: SequenceType[Sequence]) -> list[Sequence]:
        """Return decoding sequences that take part in the round after a prompt that one of `due` has just finished."""
        finished = [_eviction(s) for s in due if s.kv.num_computed == _eviction(s).context_len]
        policies = [eviction.policy for eviction in finished if eviction.policy.when.join_prefill]
        if not policies:
            return []
        others = [s for s in able if s not in due and _eviction(s).policy in policies]
        return self._shrinkable(others)

    def _evict(self, able: SequenceType[Sequence], step: float | None = None) -> set[Sequence]:
        """Run a round over as many of `able` as the cap lets in, late ones to a compression of `step`. Returns them."""
        if not able:
            return set()
        leaders: list[Sequence] = []
        same: dict[Sequence, list[Sequence]] = {}
        taken: set[Sequence] = set()
        ranked = promised = 0
        for sequence in sorted(able, key=lambda s: s.kv.last_served):
            if sequence in taken or sequence.kv.slot is None:
                continue
            size = self._memory.num_evictable(sequence)
            if leaders and self._max_kvs is not None and ranked + size > self._max_kvs:
                break
            # A round writes into the blocks that it leaves, which are copied when it is planned.
            copies = self._memory.copied_by(sequence, at_step(sequence, step))
            if copies > self._memory.num_free - promised:
                if leaders:
                    break
                if not self._running.own(sequence):
                    continue
                copies = 0
            promised += copies
            leaders.append(sequence)
            same[sequence] = self._running.siblings(sequence)
            taken |= {sequence, *same[sequence]}
            ranked += size
        # Where memory lacked for blocks of their own, some have given way, also of those taken before.
        leaders = [leader for leader in leaders if leader.kv.slot is not None]
        same = {leader: [s for s in same[leader] if s.kv.slot is not None] for leader in leaders}
        if leaders:
            self._run(leaders, same, step)
        return {sequence for leader in leaders for sequence in (leader, *same[leader])}

    def _run(self, leaders: list[Sequence], same: dict[Sequence, list[Sequence]], step: float | None) -> None:
        start = self._clock()
        planned = tuple(
            PlannedEviction(
                s.kv.running_slot,
                s.kv.num_computed,
                _asked(s, step, s.kv.num_computed),
                tuple(each.kv.running_slot for each in same[s]),
            )
            for s in leaders
        )
        seen, self._foreseen = self._foreseen, None
        lengths = seen[2] if seen is not None and seen[:2] == (tuple(leaders), planned) else None
        freed = self._memory.evict(planned, lengths)
        seconds = self._clock() - start
        self.total.add(sum(freed), seconds, len(leaders))
        for leader, blocks in zip(leaders, freed, strict=True):
            for sequence in (leader, *same[leader]):
                sequence.kv.last_round = sequence.kv.num_computed
                sequence.kv.num_rounds += 1
                sequence.rounds.add(blocks, seconds / len(leaders))
                sequence.kv.last_served = self._num_served
                self._num_served += 1
            self._memory.prefixes.remember_round(leader)


def at_step(sequence: Sequence, step: float | None) -> SequenceEviction:
    """Return how a sequence is evicted from in a round that late policies end at a compression of `step`."""
    eviction = _eviction(sequence)
    return eviction.at(step) if step is not None and eviction.policy.when.late else eviction


def _asked(sequence: Sequence, step: float | None, computed: int) -> int | None:
    """Return the budget of such a round, after `computed` tokens, if it is not the sequence's own."""
    eviction = at_step(sequence, step)
    if step is None and computed == eviction.context_len:
        eviction = eviction.first
    return None if eviction is sequence.eviction else eviction.budget


def _eviction(sequence: Sequence) -> SequenceEviction:
    assert sequence.eviction is not None, "only sequences under a policy take part in rounds"
    return sequence.eviction
