"""Executor of a model over ranks: this process is the first, and leads those in other processes."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceType
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.cache import CacheLayout, CacheSize, CacheUpdate
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray
from winnow.cache.rank_rows import join_states
from winnow.config import EngineConfig
from winnow.engine.executor import VisionTower
from winnow.engine.plan import NewSequence, PlannedEviction, StepPlan, StepResult
from winnow.eviction import EvictionPolicy
from winnow.executor.rank_executor import RankExecutor
from winnow.executor.rank_team import RankTeam
from winnow.executor.torch_executor import SubmittedStep
from winnow.models import LoadedModel
from winnow.sampling import SamplingParams


class TensorParallelExecutor:
    """Executor over all ranks of tensor parallelism. Every rank runs each call; only the first samples."""

    overlaps = False
    tower = VisionTower()

    def __init__(
        self, team: RankTeam, loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
    ) -> None:
        """Take the memory of a cache of this layout and size, each rank its part."""
        self.layout, self.size, self._team = layout, size, team
        self._rank = team.call(
            lambda: RankExecutor(loaded, config, layout, size), "build", config, layout, size
        )
        self._own = self._rank.own
        self.attention = self._own.attention

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return self._own.with_seed(params)

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Copy some blocks of this rank; the others copy as many at the same time."""
        nbytes, out, back = self._own.time_copies(clock)
        return nbytes * self._team.size, out, back

    def prepare(self, policy: EvictionPolicy) -> None:
        self._team.call(lambda: self._rank.prepare(policy), "prepare", policy)

    def apply(self, update: CacheUpdate) -> None:
        self._team.call(lambda: self._rank.apply(update), "apply", update)

    def state_bytes(self, slot: int) -> int:
        return self._own.state_bytes(slot) * self._team.size

    def fork(self, slot: int, child: NewSequence) -> None:
        self._team.call(lambda: self._rank.fork(slot, child), "fork", slot, child)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        return self._team.call(lambda: self._rank.submit(plan), "submit", plan)

    def collect(self, handle: SubmittedStep) -> StepResult:
        return self._own.collect(handle)

    def plan_evictions(self, planned: SequenceType[PlannedEviction]) -> IntArray:
        return self._team.call(lambda: self._rank.plan_evictions(planned), "plan_evictions", planned)

    def compact(self) -> None:
        self._team.call(self._rank.compact, "compact")

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        return np.concatenate(
            self._team.gather(lambda: self._rank.read_blocks(blocks), "read_blocks", blocks)
        )

    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        self._team.call(lambda: self._rank.write_blocks(blocks, data), "write_blocks", blocks, data)

    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        return join_states(self._team.gather(lambda: self._own.read_states(key), "read_states", key))

    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        self._team.call(lambda: self._rank.write_states(key, states), "write_states", key, states)

    def grant(self, kind: int, blocks: range) -> tuple[int, str | None]:
        raise AssertionError("no values lie on a tier")

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        return _by_layer(self._team.gather(lambda: self._own.kept_positions(slot), "kept_positions", slot))

    def kept_weights(self, slot: int) -> list[list[float]]:
        return _by_layer(self._team.gather(lambda: self._own.kept_weights(slot), "kept_weights", slot))

    def check_integrity(self, held: Holdings) -> None:
        self._team.call(lambda: self._rank.check_integrity(held), "check_integrity", held)

    def close(self) -> None:
        self._team.close()


def _by_layer(parts: SequenceType[list[list[Any]]]) -> list[list[Any]]:
    """Return the rows of all ranks, by layer and head."""
    return [list(chain.from_iterable(rows)) for rows in zip(*parts, strict=True)]
