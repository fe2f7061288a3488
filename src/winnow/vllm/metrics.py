"""Metrics under vLLM's names, as `LLM.get_metrics` returns them."""

from collections.abc import Mapping
from dataclasses import dataclass

from winnow.outputs import EngineStats


@dataclass(frozen=True)
class Metric:
    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True)
class Vector(Metric):
    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """Counts of values up to bounds; the engine has none, `winnow serve` shows them at /metrics."""

    count: int
    sum: float
    buckets: Mapping[str, int]


def read_gauges(stats: EngineStats) -> dict[str, tuple[str, float]]:
    """Return gauges by vLLM's names: what each is, and its value."""
    used = stats.kv_bytes_used / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0
    return {
        "num_requests_running": ("answers that hold KVs", stats.num_running),
        "num_requests_waiting": ("answers that wait for a slot", stats.num_waiting),
        "kv_cache_usage_perc": ("used part of the KV memory, 0 to 1", used),
    }


def read_counters(stats: EngineStats) -> dict[str, tuple[str, int]]:
    """Do the same for counters."""
    return {
        "num_preemptions": ("answers that gave their KVs up for others", stats.num_preemptions),
        "prompt_tokens": ("prompt tokens computed", stats.prompt_tokens),
        "generation_tokens": ("tokens sampled", stats.generated_tokens),
        "prefix_cache_hits": ("prompt tokens found in the prefix cache", stats.cached_tokens),
        "spec_decode_num_draft_tokens": ("tokens proposed", stats.num_draft_tokens),
        "spec_decode_num_accepted_tokens": ("proposed tokens that were right", stats.num_accepted_tokens),
    }


def read_metrics(stats: EngineStats, model: str) -> list[Metric]:
    """Return an engine's counters and gauges under vLLM's names."""
    labels = {"model_name": model, "engine": "0"}
    return [
        *(Gauge(f"vllm:{name}", labels, value) for name, (_, value) in read_gauges(stats).items()),
        *(Counter(f"vllm:{name}", labels, value) for name, (_, value) in read_counters(stats).items()),
    ]
