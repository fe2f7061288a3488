"""The engine as it is, with an executor that only tells time."""

from dataclasses import dataclass, field, replace

from winnow.cache import CacheLayout, CacheSize
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from winnow.engine.assemble import assemble
from winnow.engine.engine import Engine
from winnow.engine.executor import ServedModel
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.errors import CapacityError
from winnow.values.kv_dtype import WideParts
from winnow.values.units import format_bytes
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.simulated_executor import SimulatedExecutor, VirtualClock

VOCAB = 2**31
"""Token ids name blocks of prompts here, so any will do."""


@dataclass
class SimulatedEngine:
    """An engine, with what a simulation drives and reads.

    Attributes:
        rows: rows of the model that one row of the ledger stands for.
        table_bytes: of the real ledger's tables.
    """

    engine: Engine
    executor: SimulatedExecutor
    clock: VirtualClock
    rows: int
    table_bytes: int

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def used_bytes(self) -> int:
        """As `EngineStats.kv_bytes_used` of a real engine."""
        ledger = self.scheduler.ledger
        return ledger.used_bytes if self.rows == 1 else self._bytes(ledger.allocator.num_used)

    @property
    def peak_bytes(self) -> int:
        """As `EngineStats.kv_bytes_peak` of a real engine."""
        ledger = self.scheduler.ledger
        return ledger.peak_bytes if self.rows == 1 else self._bytes(ledger.peak_blocks)

    def _bytes(self, num_blocks: int) -> int:
        return num_blocks * self.scheduler.ledger.layout.block_bytes * self.rows + self.table_bytes


@dataclass(frozen=True)
class EngineSetup:
    """Parts with which an engine is opened.

    Attributes:
        cache: its `kv_memory` is the other one; its `kv_offloading_size` the host tier, for KVs of preempted requests.
        fold: let one row stand for all, which alike rows allow; where rows compete, each is taken to keep the average.
            Layers with windows of their own, values on a tier, or states beside them are never folded.
    """

    layout: CacheLayout
    kv_memory: int
    max_model_len: int
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    fold: bool = True

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        kv_memory: int | None = None,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        host_bytes: int = 0,
        fold: bool = True,
    ) -> "EngineSetup":
        """Return the setup; `kv_memory` None: all the room that weights leave, and CapacityError where that is none."""
        if kv_memory is None:
            kv_memory = deployment.kv_room
            if kv_memory <= 0:
                raise CapacityError(
                    f"{deployment.model.name} leaves no room for KVs: {format_bytes(deployment.usable_bytes)} can be "
                    f"used, its weights take {format_bytes(deployment.weight_bytes)}"
                )
        cache = replace(
            deployment.cache,
            kv_memory=kv_memory,
            prefix_store=None,
            kv_offloading_size=host_bytes or None,
            enable_prefix_caching=prefix_caching,
        )
        return cls(
            replace(deployment, cache=cache).layout,
            kv_memory,
            max_model_len or deployment.model.max_model_len or 131072,
            deployment.scheduler,
            deployment.eviction,
            cache,
            fold,
        )

    @property
    def prefix_caching(self) -> bool:
        return self.cache.shares_prefixes

    def open(self, deployment: Deployment) -> SimulatedEngine:
        """Set up the engine; times are the deployment's."""
        layout, rows, length = self.layout, 1, self.max_model_len
        size = CacheSize.fit(layout, self.kv_memory, self.scheduler.max_num_seqs, length, self.prefix_caching)
        table_bytes = size.nbytes(layout) - layout.device_bytes(size.by_kind)
        if self.fold and len(layout.groups) == 1 and not layout.state_bytes:
            rows = layout.rows_per_seq
            one = replace(layout.groups[0], layers=(0,), num_kv_heads=1)
            layout = replace(layout, groups=(one,), wide=WideParts())
            size = CacheSize(size.num_blocks // rows, size.num_pages, size.max_num_seqs, size.pages_per_seq)
        clock = VirtualClock()
        times = deployment.times.seconds
        executor = SimulatedExecutor(layout, size, clock, times, rows, deployment.traffic)
        config = EngineConfig(ModelConfig(max_model_len=length), self.cache, self.scheduler, self.eviction)
        engine = assemble(executor, ServedModel(VOCAB, length), config, clock, rows)
        return SimulatedEngine(engine, executor, clock, rows, table_bytes)
