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


def read_metrics(stats: EngineStats, model: str) -> list[Metric]:
    """Return an engine's counters and gauges under vLLM's names."""
    labels = {"model_name": model, "engine": "0"}
    used = stats.kv_bytes_used / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": used,
    }
    counters = {
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generated_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
    }
    return [
        *(Gauge(f"vllm:{name}", labels, value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", labels, value) for name, value in counters.items()),
    ]
