"""One rank of several: its part of a model, and an executor to which a scheduler speaks as to all ranks."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceType
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.attention import open_backend
from winnow.cache import CacheLayout, CacheSize, CacheUpdate
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray
from winnow.cache.rank_rows import RankRows
from winnow.config import EngineConfig, ModelConfig
from winnow.engine.plan import NewSequence, PlannedEviction, StepPlan
from winnow.eviction import EvictionPolicy
from winnow.executor.torch_executor import SubmittedStep, TorchExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.bind.paged_trial import verify_codec
from winnow.process.ranks import Ranks


def on_gpus(config: ModelConfig) -> bool:
    """Return whether ranks compute on GPUs, each on its own."""
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def load_rank(config: ModelConfig, rank: int, size: int, directory: Path) -> LoadedModel:
    """Load the part of one rank. It meets the others by a file in `directory`."""
    device = torch.device(f"cuda:{rank}" if on_gpus(config) else "cpu")
    ranks = Ranks.connect(rank, size, directory, device)
    return load_model(replace(config, device=str(device)), ranks=ranks)


def build_rank(
    loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
) -> TorchExecutor:
    """Set up what computes a rank's part of a step, in a cache of this layout and size over all ranks."""
    rows = RankRows(layout, size, loaded.ranks.rank)
    backend = open_backend(config.model.attention_backend, loaded.device, layout.of_rank)
    if config.model.verify_model:
        verify_codec(loaded, layout.of_rank, config.model.attention_backend)
    return TorchExecutor(loaded, config, backend, layout.of_rank, rows.own_size)


class RankExecutor:
    """Part of one rank in the methods of `Executor`. Every rank gets the same arguments."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
    ) -> None:
        """Take the memory of its part of a cache of this layout and size."""
        self.own = build_rank(loaded, config, layout, size)
        self._rows = RankRows(layout, size, loaded.ranks.rank)

    def prepare(self, policy: EvictionPolicy) -> None:
        self.own.prepare(policy)

    def apply(self, update: CacheUpdate) -> None:
        self.own.apply(self._rows.update(update))

    def fork(self, slot: int, child: NewSequence) -> None:
        self.own.fork(slot, child)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        return self.own.submit(replace(plan, update=self._rows.update(plan.update)))

    def plan_evictions(self, planned: SequenceType[PlannedEviction]) -> IntArray:
        return self.own.plan_evictions(planned)

    def compact(self) -> None:
        self.own.compact()

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        return self.own.read_blocks(self._rows.blocks(blocks))

    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        self.own.write_blocks(self._rows.blocks(blocks), data[self._rows.bytes_of(blocks)])

    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        return self.own.read_states(key)

    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        self.own.write_states(key, self._rows.states(states))

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        return self.own.kept_positions(slot)

    def kept_weights(self, slot: int) -> list[list[float]]:
        return self.own.kept_weights(slot)

    def check_integrity(self, held: Holdings) -> None:
        self.own.check_integrity(self._rows.holdings(held))
