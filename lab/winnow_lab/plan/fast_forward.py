"""Many decode steps at once, where each would do the same: what makes long simulations short.

While all running sequences decode and none arrives, ends, is admitted, evicted or preempted, a step changes nothing but
lengths. A leap lengthens rows, tokens and the clock by all these steps together, through the engine's own ledger and
scheduler, and stops before the step in which anything else could happen. Schedules are those of single steps.
"""

import math
from collections.abc import Sequence as SequenceType
from typing import TYPE_CHECKING

from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow_lab.plan.deployment import largest
from winnow_lab.plan.simulated_executor import SAMPLED
from winnow_lab.plan.step_time import StepWork

if TYPE_CHECKING:
    from winnow.engine.requests.request import Sequence
    from winnow_lab.plan.simulated_engine import SimulatedEngine

_FEWEST = 2
"""A leap costs about as much as this number of steps."""


class FastForward:
    """Fast-forward between the steps of a simulated engine; `num_steps` were passed over so far."""

    def __init__(self, simulated: "SimulatedEngine", prefix_caching: bool) -> None:
        self._simulated = simulated
        self._prefix_caching = prefix_caching
        self._before: tuple[list[Sequence], int] = ([], 0)
        self.num_steps = 0

    def leap(self, until: float) -> int:
        """Pass over the steps that start before `until` and change lengths alone. Returns their number, or 0.

        Call it before each step. Who waits must have found no room beside the same sequences in the step before; and a
        sequence under a policy must have run then, since its first decode step may copy shared blocks.
        """
        scheduler = self._simulated.scheduler
        running = scheduler.running
        if not running or not self._is_settled(running, len(scheduler.waiting)):
            return 0
        steps = self._most_steps(running)
        if steps < _FEWEST:
            return 0
        slots = [sequence.kv.running_slot for sequence in running]
        held = float(self._simulated.executor.mean_kvs(slots).sum())
        steps = min(steps, self._steps_until(until, len(running), held, steps))
        ledger = scheduler.ledger
        while steps >= _FEWEST and not ledger.has_room_for(ledger.demand(slots, [steps] * len(slots))):
            steps //= 2
        if steps < _FEWEST:
            return 0
        self._advance(running, slots, held, steps)
        return steps

    def _is_settled(self, running: "SequenceType[Sequence]", num_waiting: int) -> bool:
        """See `leap`; notes what runs now."""
        (before, waited), now = self._before, list(running)
        self._before = now, num_waiting
        scheduler = self._simulated.scheduler
        layout = scheduler.ledger.layout
        if layout.has_windows or layout.value_tier is not None:  # blocks leave, or values move, in every step
            return False
        if scheduler.accounts.has_quotas:  # limits are kept in every step
            return False
        if num_waiting:
            # Who is next of several tenants may change with every token.
            return (before, waited) == (now, num_waiting) and len(scheduler.waiting.tenants) == 1
        known = set(before)
        return all(sequence.eviction is None or sequence in known for sequence in now)

    def _most_steps(self, running: "SequenceType[Sequence]") -> int:
        """Return steps in which, for all that the sequences themselves say, each computes one token."""
        scheduler, most = self._simulated.scheduler, math.inf
        waits = len(scheduler.waiting) > 0
        if self._prefix_caching:  # blocks enter the index in the order in which they fill
            most = scheduler.ledger.layout.block_size
        for sequence in running:
            if not sequence.is_decoding or sequence.forks:
                return 0
            most = min(most, sequence.request.max_tokens - sequence.num_output_tokens - 1)
            eviction = sequence.eviction
            if eviction is None:
                continue
            when = eviction.policy.when
            if when.every_steps or when.uncompressed_tokens is not None or (waits and when.make_room):
                return 0
            [kvs] = self._simulated.executor.mean_kvs([sequence.kv.running_slot]).tolist()
            ahead = eviction.tokens_to_round(sequence.kv.num_computed, sequence.kv.last_round, kvs)
            if eviction.round_due(sequence.kv.num_computed, sequence.kv.last_round, kvs):
                return 0
            most = min(most, math.inf if ahead is None else ahead)
        return 0 if most is math.inf else int(most)

    def _steps_until(self, until: float, count: int, held: float, most: int) -> int:
        """How many of the next steps start before `until`."""
        clock, executor = self._simulated.clock, self._simulated.executor

        def starts(steps: int) -> bool:  # the last step starts when those before it are over
            return clock.now + executor.seconds(_decoding(count, held, steps - 1)) < until

        return most if until == math.inf or starts(most) else largest(starts, 1, most)

    def _advance(self, running: "SequenceType[Sequence]", slots: list[int], held: float, steps: int) -> None:
        scheduler, executor = self._simulated.scheduler, self._simulated.executor
        scheduler.ledger.append(slots, [steps] * len(slots))
        entries = []
        size = scheduler.ledger.layout.block_size
        for sequence, slot in zip(running, slots, strict=True):
            start = sequence.kv.num_computed
            sequence.token_ids.extend([SAMPLED] * steps)
            entries.append(PlannedSequence(slot, start, sequence.token_ids[start : start + steps]))
        order = range(len(entries))
        if self._prefix_caching:
            order = sorted(order, key=lambda index: -entries[index].start % size)  # type: ignore[assignment]
        update = scheduler.ledger.take_update()
        plan = StepPlan(tuple(entries[index] for index in order), update)
        # Tokens are charged to tenants; where there are none, no account is read.
        billed = tuple(running) * steps if any(s.request.tenant is not None for s in running) else ()
        scheduler.advance(ScheduledStep(plan, tuple(running[index] for index in order), billed))
        executor.apply(update)
        executor.spend(_decoding(len(slots), held, steps))
        self.num_steps += steps


def _decoding(count: int, held: float, steps: int) -> StepWork:
    """Return steps in which `count` sequences decode that hold `held` KVs a row together before the first."""
    if not steps:
        return StepWork()
    tokens = count * steps
    kvs = steps * held + count * steps * (steps + 1) / 2
    return StepWork(steps, tokens, tokens, kvs, kvs - tokens / 2, tokens)
