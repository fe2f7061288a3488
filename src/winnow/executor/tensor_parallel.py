"""Executors over ranks: this process is the first, and leads those in other processes."""

from collections.abc import Callable, Mapping, Sequence as SequenceType
from dataclasses import replace
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.attention import AttentionBackend, open_backend
from winnow.attention.backends import backend_name
from winnow.cache import CacheLayout, CacheSize, CacheUpdate
from winnow.cache.accounting.ledger import Holdings
from winnow.cache.accounting.prefix_chain import PrefixKey
from winnow.cache.layout import IntArray
from winnow.cache.rank_rows import RankRows, join_states
from winnow.config import EngineConfig, ModelConfig
from winnow.engine.executor import VisionTower
from winnow.engine.plan import StepResult
from winnow.errors import ConfigError
from winnow.executor.rank_team import RankTeam
from winnow.executor.torch_executor import SubmittedStep, TorchExecutor
from winnow.models import LoadedModel, load_model
from winnow.models.load.paged_trial import verify_codec
from winnow.process.ranks import Ranks
from winnow.sampling import SamplingParams


def on_gpus(config: ModelConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def load_rank(config: ModelConfig, rank: int, size: int, directory: Path) -> LoadedModel:
    """Load the part of one rank. It meets the others by a file in `directory`."""
    device = torch.device(f"cuda:{rank}" if on_gpus(config) else "cpu")
    ranks = Ranks.connect(rank, size, directory, device)
    return load_model(replace(config, device=str(device)), ranks=ranks)


def build_executor(
    loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
) -> TorchExecutor:
    return TorchExecutor(loaded, config, _backend(loaded, config, layout), layout, size)


def _backend(loaded: LoadedModel, config: EngineConfig, layout: CacheLayout) -> AttentionBackend:
    name = backend_name(config.model.attention_backend, loaded.device, layout)
    if config.scheduler.batch_invariant and name != "native":
        raise ConfigError(f"batch_invariant needs attention_backend native, on a CPU, got {name}")
    backend = open_backend(name, loaded.device, layout)
    if config.model.verify_model:
        verify_codec(loaded, layout, config.model.attention_backend)
    return backend


class RankExecutor(TorchExecutor):
    """Executor of one rank's part, to which a scheduler speaks as to all ranks: each gets the same arguments. Layout
    and size are those of the cache over all ranks."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
    ) -> None:
        self._rows = RankRows(layout, size, loaded.ranks.rank)
        backend = _backend(loaded, config, layout.of_rank)
        super().__init__(loaded, config, backend, layout.of_rank, self._rows.own_size)

    def apply(self, update: CacheUpdate) -> None:
        super().apply(self._rows.update(update))

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        return super().read_blocks(self._rows.blocks(blocks))

    def write_blocks(self, blocks: IntArray, data: NDArray[np.uint8]) -> None:
        super().write_blocks(self._rows.blocks(blocks), data[self._rows.bytes_of(blocks)])

    def write_states(self, key: PrefixKey, states: Mapping[str, NDArray[Any]]) -> None:
        super().write_states(key, self._rows.states(states))

    def check_integrity(self, held: Holdings) -> None:
        super().check_integrity(self._rows.holdings(held))


class TensorParallelExecutor:
    """Executor over all ranks of tensor parallelism. Every rank runs each call; only the first samples. Of a cache of
    this layout and size each takes the memory of its part."""

    overlaps = False
    tower = VisionTower()
    reuse_refusal = "several processes compute it"

    def __init__(
        self, team: RankTeam, loaded: LoadedModel, config: EngineConfig, layout: CacheLayout, size: CacheSize
    ) -> None:
        self.layout, self.size, self._team = layout, size, team
        own = partial(RankExecutor, loaded, config, layout, size)
        self._own: RankExecutor = team.call(own, "build", config, layout, size)
        self.attention = self._own.attention

    def with_seed(self, params: SamplingParams) -> SamplingParams:
        return self._own.with_seed(params)

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Copy some blocks of this rank; the others copy as many at the same time."""
        nbytes, out, back = self._own.time_copies(clock)
        return nbytes * self._team.size, out, back

    def state_bytes(self, slot: int) -> int:
        return self._own.state_bytes(slot) * self._team.size

    def collect(self, handle: SubmittedStep) -> StepResult:
        return self._own.collect(handle)

    def grant(self, kind: int, blocks: range) -> tuple[int, str | None]:
        raise AssertionError("no values lie on a tier")

    def close(self) -> None:
        self._team.close()

    # -- on every rank -------------------------------------------------------------------------------------------

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        return self._team.gather(partial(getattr(self._own, name), *arguments), name, *arguments)

    def _first(self, name: str, *arguments: Any) -> Any:
        return self._all(name, *arguments)[0]

    prepare = partialmethod(_first, "prepare")
    apply = partialmethod(_first, "apply")
    fork = partialmethod(_first, "fork")
    submit = partialmethod(_first, "submit")
    plan_evictions = partialmethod(_first, "plan_evictions")
    compact = partialmethod(_first, "compact")
    write_blocks = partialmethod(_first, "write_blocks")
    write_states = partialmethod(_first, "write_states")
    check_integrity = partialmethod(_first, "check_integrity")

    def read_blocks(self, blocks: IntArray) -> NDArray[np.uint8]:
        return np.concatenate(self._all("read_blocks", blocks))

    def read_states(self, key: PrefixKey) -> dict[str, NDArray[Any]]:
        return join_states(self._all("read_states", key))

    def kept_positions(self, slot: int) -> list[list[list[int]]]:
        return _by_layer(self._all("kept_positions", slot))

    def kept_weights(self, slot: int) -> list[list[float]]:
        return _by_layer(self._all("kept_weights", slot))


def _by_layer(parts: SequenceType[list[list[Any]]]) -> list[list[Any]]:
    return [list(chain.from_iterable(rows)) for rows in zip(*parts, strict=True)]
