"""The refusal of a request that cannot fit names need and limit, for any number of block kinds."""

from typing import Any

import pytest
import torch

from winnow.cache import CacheLayout, CacheSize
from winnow.config import CacheConfig, SchedulerConfig
from winnow.engine.memory.memory import Memory
from winnow.engine.requests.request import Request
from winnow.engine.scheduling.scheduler import Scheduler
from winnow.outputs import RequestMetrics
from winnow.sampling import SamplingParams
from winnow.values.value_tier import ValueTier
from winnow_lab.plan.simulated_executor import SimulatedExecutor, VirtualClock


def executor_of(num_blocks: int, **shape: Any) -> SimulatedExecutor:
    layout = CacheLayout.even(4, 2, 4, 4, torch.float32, **shape)
    size = CacheSize.of_blocks(layout, num_blocks, 2, 400)
    return SimulatedExecutor(layout, size, VirtualClock(), lambda work: 0.0)


@pytest.mark.parametrize(
    ("shape", "explained"),
    [
        ({}, ""),
        ({"value_tier": ValueTier.parse("host:L=0,N=8")}, ""),
        (
            {"value_tier": ValueTier.parse("host:L=1,N=8")},
            ", of which 4 serve 2 of 8 rows and 12 serve 6 of 8 rows with values on value_tier=host:L=1,N=8",
        ),
        (
            {"shapes": [(2, 4), (2, 8), (2, 4), (2, 8)]},
            ", of which 8 serve 4 of 8 rows and 8 serve 4 of 8 rows",
        ),
        (
            {"shapes": [(2, 4), (1, 8), (2, 4), (3, 4)], "value_tier": ValueTier.parse("host:L=2,N=8")},
            ", of which 2 serve 1 of 8 rows, 4 serve 2 of 8 rows and 10 serve 5 of 8 rows with values on "
            "value_tier=host:L=2,N=8",
        ),
    ],
    ids=["one kind", "one kind on a tier", "two by tier", "two by shape", "three"],
)
def test_the_kinds_of_blocks_are_named(shape: dict[str, Any], explained: str) -> None:
    executor = executor_of(16, **shape)
    config = SchedulerConfig(2)
    memory = Memory(executor, executor.clock, config, CacheConfig(enable_prefix_caching=False))
    scheduler = Scheduler(config, executor, executor.clock, memory)
    params = SamplingParams(max_tokens=4)
    scheduler.add(Request("0", None, [3] * 80, params, 4, RequestMetrics(0.0)))
    scheduler.running.preempt()  # nothing runs, so that who waits first has found no room
    [failed] = scheduler.running.take_failed()
    assert failed.error is not None
    assert failed.error.startswith("kv_memory is too small for this request alone: with 80 tokens it needs")
    size = executor.size
    assert failed.error.endswith(f" and {size.num_pages}{explained}")
    assert f"there are {size.num_blocks} (" in failed.error
