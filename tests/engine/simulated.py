"""The scheduler without any model: the planner's executor that only tells time, with a record of its plans."""

from collections.abc import Sequence as SequenceType
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from winnow.cache import (
    BlockCopies,
    CacheLayout,
    CacheSize,
    CacheUpdate,
    CopyDiscarded,
    HostTierError,
    RowsRestored,
    RowsSaved,
)
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.layout import IntArray, ceil_div
from winnow.config import CacheConfig, EvictionConfig, SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.plan import PlannedEviction, StepPlan, StepResult
from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.plan_builder import ScheduledStep
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.eviction import (
    EvictionPolicy,
    EvictionTarget,
    Instruction,
    SequenceEviction,
    replay_passes,
    resolve_policy,
)
from winnow.outputs import RequestMetrics
from winnow.sampling import SamplingParams
from winnow_lab.plan.simulated_executor import SimulatedExecutor, VirtualClock
from winnow_lab.plan.step_time import StepWork

ROWS = 4  # 2 layers x 2 heads
BLOCK = 4


class RecordingExecutor(SimulatedExecutor):
    """A step takes 1 ms and 10 us per token, a round 0.5 ms; both are recorded.

    Where rows compete for a budget, the first ones keep all of it.
    """

    def __init__(
        self, num_blocks: int, max_num_seqs: int, clock: VirtualClock, max_model_len: int = 400
    ) -> None:
        layout = CacheLayout.even(2, 2, 4, BLOCK, torch.float32)
        size = CacheSize.of_blocks(layout, num_blocks, max_num_seqs, max_model_len)
        super().__init__(layout, size, clock, self._time)
        self.plans: list[StepPlan] = []
        self.closed: list[int] = []
        self.rounds: list[list[EvictionTarget]] = []
        self.num_copied = 0
        self.saved: dict[int, int] = {}
        self.seconds_per_byte = 1e-9
        self.fails = 0

    def state_bytes(self, slot: int) -> int:
        return 100

    def submit(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().submit(plan)

    def apply(self, update: CacheUpdate) -> None:
        self.num_copied += sum(len(c.source) for c in update.copies if isinstance(c, BlockCopies))
        for each in update.copies:
            if isinstance(each, RowsSaved):
                self.saved[each.host_id] = len(each.blocks)
            elif isinstance(each, RowsRestored):
                assert self.saved[each.host_id] == len(each.blocks)
            elif isinstance(each, CopyDiscarded):
                self.saved.pop(each.host_id, None)  # after a failure it is said again
        self.closed += update.closed
        super().apply(update)
        if self.fails and (copied := [c for c in update.copies if isinstance(c, RowsSaved | RowsRestored)]):
            self.fails -= 1
            raise HostTierError([each.host_id for each in copied], "not enough memory")

    def plan_evictions(self, planned: SequenceType[PlannedEviction]) -> IntArray:
        members = []
        for each in planned:
            eviction = self.evictions[each.slot]
            assert eviction is not None
            members.append(EvictionTarget(each.slot, eviction, each.computed))
        self.rounds.append(members)
        return super().plan_evictions(planned)

    def kept(self, held: IntArray, eviction: SequenceEviction) -> IntArray:
        if eviction.policy.budget.equal_rows:
            return super().kept(held, eviction)
        return _first_rows(held, ceil_div(eviction.target * ROWS, BLOCK))

    def check_integrity(self, held: Holdings) -> None:
        super().check_integrity(held)
        assert held.host_ids == set(self.saved)

    def _time(self, work: StepWork) -> float:
        seconds = 0.001 * work.steps + 1e-5 * work.tokens + 0.0005 * work.rounds
        return seconds + work.link_bytes * self.seconds_per_byte


def _first_rows(held: IntArray, blocks: int) -> IntArray:
    """What rows of `held` KVs keep of `blocks` blocks, if each takes all it has and the first ones choose."""
    lengths = np.zeros_like(held)
    for row, length in enumerate(held.ravel().tolist()):
        lengths.flat[row] = min(length, BLOCK * blocks)
        blocks -= ceil_div(int(lengths.flat[row]), BLOCK)
    return lengths


class Simulation:
    """The loop of the engine, less the text: a sequence ends at `max_tokens`."""

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int = 8,
        tokens: int = 64,
        chunk: int | None = 16,
        max_round_kvs: int | None = None,
        host_bytes: int = 0,
        costs: SwapCosts | None = None,
        prefix_caching: bool = False,
        **options: Any,
    ) -> None:
        """`options` are further fields of the scheduler's configuration."""
        self.clock = VirtualClock()
        self.executor = RecordingExecutor(num_blocks, max_num_seqs, self.clock)
        config = SchedulerConfig(max_num_seqs, tokens, chunk, **options)
        cache = CacheConfig(enable_prefix_caching=prefix_caching)
        memory = Memory(self.executor, self.clock, config, cache)
        memory.ledger.host.limit, memory.swap.costs = host_bytes, costs or SwapCosts()
        self.scheduler = Scheduler(config, self.executor, self.clock, memory, max_round_kvs=max_round_kvs)
        self.steps: list[ScheduledStep] = []
        self.finished: list[Sequence] = []
        self.num_requests = 0

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        n: int = 1,
        policy: EvictionPolicy | None = None,
        budget: int = 8,
        priority: int = 0,
        tenant: str | None = None,
        prompt: list[int] | None = None,
    ) -> Request:
        """Queue a request, under a policy that keeps `budget` KVs per row."""
        eviction = None
        if policy is not None:
            config = EvictionConfig(eviction=policy, kv_budget=budget)
            eviction = resolve_policy(config).for_prompt(prompt_len, prompt_len + max_tokens - 1)
            replay = policy.score.replay
            if eviction is not None and replay is not None and prompt_len > eviction.target:
                passes = replay_passes(replay, [3] * prompt_len, Instruction(), 0, 400)
                eviction = replace(eviction, passes=passes)
        request = Request(
            str(self.num_requests),
            None,
            prompt or [3] * prompt_len,
            SamplingParams(n=n, max_tokens=max_tokens),
            max_tokens,
            RequestMetrics(self.clock()),
            (eviction,),
            priority=priority,
            tenant=tenant,
        )
        self.num_requests += 1
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        self.steps.append(step)
        self.finished += self.scheduler.running.take_failed()
        start = self.clock()
        result = self.executor.collect(self.executor.submit(step.plan))
        self.scheduler.advance(step, seconds=self.clock() - start)
        for sequence, token in zip(step.samplers, result.token_ids, strict=True):
            sequence.token_ids.append(token)
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                self.scheduler.running.finish(sequence, "length")
                self.finished.append(sequence)
        ledger = self.scheduler.ledger
        ledger.check_integrity()
        self.executor.apply(ledger.take_update())
        self.executor.check_integrity(ledger.holdings())
        assert {i: copy.num_blocks for i, copy in ledger.host.copies.items()} == self.executor.saved
        return step

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")
