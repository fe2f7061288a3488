"""Metrics for Prometheus, under `winnow_` names, and under vLLM's where that is asked for."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from winnow.outputs import EngineStats, RequestOutput

_TTFT = (
    *(
        0.001,
        0.005,
        0.01,
        0.02,
        0.04,
        0.06,
        0.08,
        0.1,
        0.25,
        0.5,
        0.75,
        1,
        2.5,
        5,
        7.5,
        10,
        20,
        40,
        80,
        160,
        640,
    ),
    2560,
)
_ITL = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    40,
    80,
)
_REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 480, 1920, 7680)
_TOKENS = tuple(2**power for power in range(21))
_RATIOS = (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("from arrival to the first token", _TTFT),
    "inter_token_latency_seconds": ("between two tokens of a request", _ITL),
    "e2e_request_latency_seconds": ("from arrival to the last token", _REQUEST),
    "request_queue_time_seconds": ("from arrival to the first step", _REQUEST),
    "request_prefill_time_seconds": ("from the first step to the first token", _REQUEST),
    "request_decode_time_seconds": ("from the first token to the last", _REQUEST),
    "request_inference_time_seconds": ("from the first step to the last token", _REQUEST),
    "request_prompt_tokens": ("tokens of a request's prompt", _TOKENS),
    "request_generation_tokens": ("tokens of a request's answers", _TOKENS),
    "request_params_n": ("answers asked for", _TOKENS[:8]),
}
_OWN_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "request_compression_ratio": ("tokens computed per KV kept, of answers under a policy", _RATIOS),
}


_SHOWN = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "e2e_request_latency_seconds": "whole answer",
}
_QUANTILES = (0.5, 0.9, 0.99)
_RECENT = 1024


class Metrics:
    """Counters of what leaves the engine; gauges are read when they are asked for.

    Args:
        model: the label `model_name`.
        vllm: serve vLLM's names too.
        cache: what vLLM says of its cache, under its names.
    """

    def __init__(self, model: str, vllm: bool, cache: Mapping[str, str]) -> None:
        self._labels = {"model_name": model}
        self.registry = CollectorRegistry()
        if vllm:
            text, labels = "blocks of the KV cache, of block_size tokens in every row", [*cache, "engine"]
            info = Gauge("vllm:cache_config_info", text, labels, registry=self.registry)
            info.labels(**cache, engine="0").set(1)
        prefixes = ["winnow_", *(["vllm:"] if vllm else [])]
        self._vllm = vllm
        self._histograms = {
            name: [self._histogram(prefix + name, text, buckets) for prefix in prefixes]
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._histograms |= {
            name: [self._histogram(f"winnow_{name}", text, buckets)]
            for name, (text, buckets) in _OWN_HISTOGRAMS.items()
        }
        self.finished: dict[str, int] = {}
        self._by_tenant: dict[tuple[str, str], int] = {}
        self._last_token: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._recent = {name: deque[float](maxlen=_RECENT) for name in _SHOWN}
        self.evicted_kvs = 0
        self.prefix_queries = 0

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        labels = [*self._labels, *(["engine"] if name.startswith("vllm:") else [])]
        family = Histogram(name, text, labels, buckets=tuple(buckets), registry=self.registry)
        return family.labels(**self._labels, **({"engine": "0"} if "engine" in labels else {}))

    def _record(self, name: str, value: float) -> None:
        if name in self._recent:
            self._recent[name].append(value)
        for histogram in self._histograms[name]:
            histogram.observe(value)

    # -- what happens ----------------------------------------------------------------------------------------------

    def observe(self, outputs: Iterable[RequestOutput]) -> None:
        """Count a step's outputs."""
        now = time.monotonic()
        for output in outputs:
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            name = output.request_id
            self._seen[name] = self._seen.get(name, 0) + tokens
            last = self._last_token.get(name)
            if tokens:
                if last is not None:
                    self._record("inter_token_latency_seconds", now - last)
                self._last_token[name] = now
            if output.finished:
                self._count_finished(output)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Count requests whose client has left, or that the engine gave up."""
        for name in request_ids:
            self._seen.pop(name, None)
            self._last_token.pop(name, None)
            self.finished["abort"] = self.finished.get("abort", 0) + 1

    def count_tokens(self, tenant: str | None, prompt: int, answers: int) -> None:
        """Count what a tenant's request used."""
        for kind, tokens in (("prompt", prompt), ("generation", answers)):
            key = (tenant or "", kind)
            self._by_tenant[key] = self._by_tenant.get(key, 0) + tokens

    def _count_finished(self, output: RequestOutput) -> None:
        generated = self._seen.pop(output.request_id, 0)
        self._last_token.pop(output.request_id, None)
        self.prefix_queries += len(output.prompt_token_ids)
        for answer in output.outputs:
            reason = answer.finish_reason or "error"
            self.finished[reason] = self.finished.get(reason, 0) + 1
            if answer.eviction is not None:
                self._record("request_compression_ratio", answer.eviction.compression)
                report = answer.eviction
                rows = sum(len(layer) for layer in report.kept)
                self.evicted_kvs += max(0, report.num_tokens * rows - sum(map(sum, report.kept)))
        self._record("request_prompt_tokens", len(output.prompt_token_ids))
        self._record("request_generation_tokens", generated)
        self._record("request_params_n", len(output.outputs))
        times = output.metrics
        end, first, start = times.finished_time, times.first_token_time, times.first_scheduled_time
        if end is not None:
            self._record("e2e_request_latency_seconds", end - times.arrival_time)
        if first is not None:
            self._record("time_to_first_token_seconds", first - times.arrival_time)
            if end is not None:
                self._record("request_decode_time_seconds", end - first)
        if start is not None:
            self._record("request_queue_time_seconds", start - times.arrival_time)
            if first is not None:
                self._record("request_prefill_time_seconds", first - start)
            if end is not None:
                self._record("request_inference_time_seconds", end - start)

    # -- what is read ----------------------------------------------------------------------------------------------

    def latencies(self) -> dict[str, list[float]]:
        """Return the 50th, 90th and 99th percentile of the last requests' seconds, by what passed, if any."""
        return {
            shown: [float(each) for each in np.quantile(self._recent[name], _QUANTILES)]
            for name, shown in _SHOWN.items()
            if self._recent[name]
        }

    def render(self, stats: EngineStats, by_tenant: Mapping[str | None, tuple[int, int]]) -> bytes:
        """Return the text that Prometheus reads."""
        snapshot = CollectorRegistry()
        snapshot.register(_Snapshot(self._families(stats, by_tenant)))
        return bytes(generate_latest(snapshot)) + bytes(generate_latest(self.registry))

    def _families(
        self, stats: EngineStats, by_tenant: Mapping[str | None, tuple[int, int]]
    ) -> Iterator[Metric]:
        used = stats.kv_bytes_used / stats.kv_bytes_budget if stats.kv_bytes_budget else 0.0
        gauges = {
            "num_requests_running": ("answers that hold KVs", stats.num_running),
            "num_requests_waiting": ("answers that wait for a slot", stats.num_waiting),
            "kv_cache_usage_perc": ("used part of the KV memory, 0 to 1", used),
        }
        counters = {
            "num_preemptions": ("answers that gave their KVs up for others", stats.num_preemptions),
            "prompt_tokens": ("prompt tokens computed", stats.prompt_tokens),
            "generation_tokens": ("tokens sampled", stats.generated_tokens),
            "prefix_cache_queries": ("prompt tokens looked for in the prefix cache", self.prefix_queries),
            "prefix_cache_hits": ("prompt tokens found in the prefix cache", stats.cached_tokens),
            "spec_decode_num_draft_tokens": ("tokens proposed", stats.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("proposed tokens that were right", stats.num_accepted_tokens),
        }
        own_gauges: dict[str, tuple[str, float]] = {
            "kv_bytes_used": ("bytes of KV memory in use", stats.kv_bytes_used),
            "kv_bytes_peak": ("most bytes of KV memory in use so far", stats.kv_bytes_peak),
            "kv_bytes_budget": ("bytes of KV memory", stats.kv_bytes_budget),
            "host_bytes_used": ("bytes of KVs in host memory", stats.host_bytes_used),
            "image_bytes": ("bytes of what the vision tower made of pictures", stats.image_bytes),
            "host_bytes_budget": ("bytes that KVs may take in host memory", stats.host_bytes_budget),
            "kv_bytes_cached": ("bytes that only the prefix cache holds, free for use", stats.cached_bytes),
        }
        own_counters: dict[str, tuple[str, float]] = {
            "steps": ("steps of the engine", stats.num_steps),
            "eviction_rounds": ("rounds of eviction", stats.num_rounds),
            "kv_bytes_freed": ("bytes freed by eviction", stats.kv_bytes_freed),
            "swaps": ("preemptions that copied KVs to host memory", stats.num_swaps),
            "swap_out_bytes": ("bytes copied to host memory", stats.swap_bytes_out),
            "swap_in_bytes": ("bytes copied back", stats.swap_bytes_in),
            "recomputed_tokens": ("tokens computed again after a preemption", stats.recomputed_tokens),
            "evicted_kvs": ("KVs of finished answers that were evicted", self.evicted_kvs),
            "session_tokens": ("tokens of conversations not computed again", stats.session_tokens),
            "session_seconds": ("seconds that these would have taken", stats.session_seconds),
            "session_compressions": ("conversations compressed for their age", stats.session_compressions),
            "sessions_dropped": ("conversations forgotten for their budgets", stats.sessions_dropped),
            "sessions_released": ("conversations that clients released", stats.sessions_released),
            "replay_tokens": ("tokens computed to judge KVs by a replay", stats.replay_tokens),
        }
        if (disk := stats.disk_tier) is not None:
            own_gauges |= {
                "disk_bytes_used": ("bytes of files in the folder of prefixes", disk.bytes_used),
                "disk_bytes_budget": ("bytes that these files may take", disk.bytes_budget),
                "disk_writing": ("1, or 0 once the disk has refused a file", int(disk.is_writing)),
            }
            own_counters |= {
                "disk_loaded_tokens": ("tokens whose KVs came from disk", disk.loaded_tokens),
                "disk_read_bytes": ("bytes read from disk", disk.bytes_read),
                "disk_read_seconds": ("seconds of these reads", disk.read_seconds),
                "disk_written_bytes": ("bytes written to disk", disk.bytes_written),
                "disk_dropped_files": ("files deleted for room", disk.num_dropped),
                "disk_damaged_files": ("files that could not be read", disk.num_damaged),
            }
        for prefix, labels in self._spaces():
            for name, (text, value) in gauges.items():
                yield _gauge(prefix + name, text, labels, value)
            for name, (text, value) in counters.items():
                yield _counter(prefix + name, text, labels, value)
            success = CounterMetricFamily(
                f"{prefix}request_success", "answers that ended, by why", labels=[*labels, "finished_reason"]
            )
            for reason, count in sorted(self.finished.items()):
                success.add_metric([*labels.values(), reason], count)
            yield success
        for name, (text, value) in own_gauges.items():
            yield _gauge(f"winnow_{name}", text, self._labels, value)
        for name, (text, value) in own_counters.items():
            yield _counter(f"winnow_{name}", text, self._labels, value)
        sessions = GaugeMetricFamily(
            "winnow_sessions", "conversations, by where KVs lie", labels=[*self._labels, "tier"]
        )
        for tier, number in stats.sessions.items():
            sessions.add_metric([*self._labels.values(), tier], number)
        yield sessions
        yield self._draft_rates(stats)
        yield self._seconds(stats)
        yield from self._tenants(by_tenant)

    def _spaces(self) -> Iterator[tuple[str, dict[str, str]]]:
        yield "winnow_", self._labels
        if self._vllm:
            yield "vllm:", {**self._labels, "engine": "0"}

    def _draft_rates(self, stats: EngineStats) -> Metric:
        text = "tokens a second with drafts (drafted) and without, by the most sequences measured together"
        labels = [*self._labels, "running", "kind"]
        family = GaugeMetricFamily("winnow_draft_tokens_per_second", text, labels=labels)
        for each in stats.draft_rates:
            for kind, value in (("plain", each.plain), ("drafted", each.drafted)):
                if value is not None:
                    family.add_metric([*self._labels.values(), str(each.most_running), kind], value)
        return family

    def _seconds(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "winnow_engine_seconds", "seconds of the engine, by phase", labels=[*self._labels, "phase"]
        )
        for phase, seconds in sorted(stats.elapsed.items()):
            family.add_metric([*self._labels.values(), phase], max(0.0, seconds))
        return family

    def _tenants(self, by_tenant: Mapping[str | None, tuple[int, int]]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "winnow_tenant_answers", "answers in progress", labels=[*self._labels, "tenant", "state"]
        )
        for tenant, counts in by_tenant.items():
            for state, count in zip(("running", "waiting"), counts, strict=True):
                gauge.add_metric([*self._labels.values(), tenant or "", state], count)
        yield gauge
        tokens = CounterMetricFamily(
            "winnow_tenant_tokens", "tokens served", labels=[*self._labels, "tenant", "kind"]
        )
        for (name, kind), count in sorted(self._by_tenant.items()):
            tokens.add_metric([*self._labels.values(), name, kind], count)
        yield tokens


class _Snapshot(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(name: str, text: str, labels: Mapping[str, Any], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: Mapping[str, Any], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
