"""An executor that only tells time, and the clock that it moves: the engine runs without any model."""

from collections.abc import Callable, Mapping, Sequence as SequenceType
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.cache import CacheLayout, CacheSize, CacheUpdate, CopyDiscarded, RowsRestored, RowsSaved
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray, ceil_div
from winnow.engine.executor import VisionTower
from winnow.engine.plan import NewSequence, PlannedEviction, StepPlan, StepResult
from winnow.eviction import EvictionPolicy, SequenceEviction
from winnow.eviction.budgets import Budget
from winnow.sampling import SamplingParams
from winnow_lab.plan.step_time import StepWork, TierTraffic

SAMPLED = 5
"""The token that every sequence samples."""


class VirtualClock:
    """Clock whose seconds pass on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedExecutor:
    """Executor that follows plans, moves the clock by what a step takes, and samples `SAMPLED`.

    Rounds of eviction keep what the budget leaves, spread evenly over the rows: which KVs stay is of no matter here.
    A budget without a bound keeps everything, which is the most that it may.

    Args:
        rows: rows of the model that one row stands for.
        traffic: of a value tier; None: there is none.

    Attributes:
        seconds: time of a step, or of a round, that does some work.
        lengths: KVs of each row, int32 [slots, layers, heads].
    """

    attention = "simulated"
    overlaps = False
    tower = VisionTower()
    reuse_refusal = None

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        clock: VirtualClock,
        seconds: Callable[[StepWork], float],
        rows: int = 1,
        traffic: TierTraffic | None = None,
    ) -> None:
        self.layout, self.size, self.clock = layout, size, clock
        self.lengths: IntArray = np.zeros(
            (size.max_num_seqs, layout.num_layers, layout.num_kv_heads), dtype=np.int32
        )
        self.evictions: dict[int, SequenceEviction | None] = {}
        self.total = StepWork()
        self.seconds = seconds
        self._rows_each = rows
        self._traffic = traffic or TierTraffic()
        windows = [np.iinfo(np.int32).max if each is None else each for each in layout.windows]
        self._windows = np.array(windows, dtype=np.int32)[:, None] if layout.has_windows else None
        self._saved: dict[int, SequenceEviction | None] = {}

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return params

    def fork(self, slot: int, child: NewSequence) -> None:
        assert self.evictions[slot] == child.eviction, "a fork is under the policy of what it continues"
        self.evictions[child.slot] = child.eviction

    def prepare(self, policy: EvictionPolicy) -> None:
        pass

    def state_bytes(self, slot: int) -> int:
        return self.layout.state_bytes

    def copy_work(self, num_blocks: int) -> StepWork:
        """Return the work of copying blocks to the host, or back."""
        return StepWork(link_bytes=num_blocks * self.layout.block_bytes * self._rows_each)

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        seconds = self.seconds(self.copy_work(1))
        return self.layout.block_bytes, seconds, seconds

    def apply(self, update: CacheUpdate) -> None:
        for copied in update.copies:
            if isinstance(copied, RowsSaved | RowsRestored):
                self.spend(self.copy_work(len(copied.blocks)))
            if isinstance(copied, RowsSaved):
                self._saved[copied.host_id] = self.evictions[copied.slot]
            elif isinstance(copied, RowsRestored):
                self.evictions[copied.slot] = self._saved[copied.host_id]
            elif isinstance(copied, CopyDiscarded):
                self._saved.pop(copied.host_id, None)
        for each in update.lengths:
            self.lengths[each.slots] = each.lengths

    def submit(self, plan: StepPlan) -> StepResult:
        self.apply(plan.update)
        for new in plan.new_sequences:
            self.evictions[new.slot] = new.eviction
        self.spend(self.work(plan))
        samplers = len(plan.samplers)
        return StepResult([SAMPLED] * samplers, [None] * samplers, {})

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def work(self, plan: StepPlan) -> StepWork:
        entries = plan.entries
        counts = np.fromiter((entry.count - entry.reused for entry in entries), np.float64, len(entries))
        held = self.mean_kvs([entry.slot for entry in entries])
        traffic, link = self._traffic, 0.0
        if traffic.rows:
            moved = (
                traffic.decode(1, kvs) if count == 1 else traffic.prefill(count)
                for count, kvs in zip(counts.tolist(), held.tolist(), strict=True)
            )
            link = sum(each.link_bytes for each in moved)
        return StepWork(
            steps=1,
            tokens=float(counts.sum()),
            sequences=len(entries),
            kv_tokens=float(held.sum()),
            # Causal: of the step's own tokens each sees half of them on average.
            attended=float(counts @ (held - counts / 2)),
            samples=len(plan.samplers),
            link_bytes=link,
            prompt_tokens=float(counts[counts > 1].sum()),
        )

    def mean_kvs(self, slots: list[int]) -> NDArray[np.float64]:
        """Return KVs per row that the next tokens of some slots read, on average over their rows."""
        lengths = self.lengths[slots]
        if self._windows is not None:
            lengths = np.minimum(lengths, self._windows)
        lengths = lengths.reshape(len(slots), -1)
        return lengths[:, 0].astype(np.float64) if lengths.shape[1] == 1 else lengths.mean(axis=1)

    def spend(self, work: StepWork) -> None:
        self.total = self.total.plus(work)
        self.clock.now += self.seconds(work)

    def plan_evictions(self, planned: SequenceType[PlannedEviction]) -> IntArray:
        slots = [each.slot for each in planned]
        self.spend(StepWork(round_kvs=float(self.mean_kvs(slots).sum()), rounds=1))
        for each in planned:
            eviction = self.evictions[each.slot]
            assert eviction is not None, "only sequences under a policy take part in rounds"
            if each.budget is not None:
                eviction = replace(eviction, budget=each.budget)
            self.lengths[each.slot] = self.kept(self.lengths[each.slot], eviction)
        kept: IntArray = self.lengths[slots]
        return kept

    def compact(self) -> None:
        """Do nothing: no KV moves."""

    def kept(self, held: IntArray, eviction: SequenceEviction) -> IntArray:
        """Return KVs that a round leaves of rows of `held` KVs, [layers, heads]."""
        target, budget = eviction.target, eviction.policy.budget
        layers = list(self.layout.evictable)
        if len(layers) < self.layout.num_layers:
            kept = held.copy()
            kept[layers] = self._kept(held[layers], self.layout.evictable_part, target, budget)
            return kept
        return self._kept(held, self.layout, target, budget)

    @staticmethod
    def _kept(held: IntArray, layout: CacheLayout, target: int, budget: Budget) -> IntArray:
        size, rows = layout.block_size, layout.rows_per_seq
        if budget.equal_rows or budget.blocks_after(layout, target, 0) > ceil_div(target * rows, size):
            return np.minimum(held, target)
        # Rows that compete for blocks keep whole ones.
        least, more = divmod(ceil_div(target * rows, size), rows)
        blocks = np.full(rows, least)
        blocks[:more] += 1
        most = np.zeros_like(held)
        most[:, : layout.num_kv_heads][layout.has_row] = blocks * size
        return np.minimum(held, most)

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        return np.zeros(0, dtype=np.uint8)

    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        pass

    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        return {}

    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        pass

    def grant(self, kind: int, blocks: range) -> tuple[int, str | None]:
        return blocks.start, None

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        """Return positions as if the oldest tokens had stayed: the simulation knows lengths only."""
        return [[list(range(length)) for length in heads] for heads in self.lengths[slot].tolist()]

    def kept_weights(self, slot: int) -> list[list[float]]:
        return self.lengths[slot].astype(float).tolist()

    def check_integrity(self, held: Holdings) -> None:
        assert np.array_equal(self.lengths, held.lengths)

    def close(self) -> None:
        """Do nothing: there is no other process to keep out."""
