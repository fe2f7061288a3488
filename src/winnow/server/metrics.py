"""Metrics for Prometheus, under `winnow_` names, and under vLLM's where that is asked for."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from winnow.outputs import EngineStats, RequestOutput
from winnow.vllm.metrics import read_counters, read_gauges

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT = (*_FIRST, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_ITL = (*_NEXT, 1, 2.5, 5, 10, 40, 80)
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
    "request_compression_ratio": ("tokens computed per KV kept, of answers under a policy", _RATIOS),
}
_SPANS = {
    "time_to_first_token_seconds": ("arrival_time", "first_token_time"),
    "e2e_request_latency_seconds": ("arrival_time", "finished_time"),
    "request_queue_time_seconds": ("arrival_time", "first_scheduled_time"),
    "request_prefill_time_seconds": ("first_scheduled_time", "first_token_time"),
    "request_decode_time_seconds": ("first_token_time", "finished_time"),
    "request_inference_time_seconds": ("first_scheduled_time", "finished_time"),
}
"""Beginning and end of what is measured, fields of `RequestMetrics`."""
_SHOWN = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "e2e_request_latency_seconds": "whole answer",
}
_QUANTILES = (0.5, 0.9, 0.99)
_Numbers = dict[str, tuple[str, float]]
_RECENT = 1024


class Metrics:
    """Counters of what leaves the engine; gauges are read when they are asked for.

    Args:
        vllm: serve vLLM's names too, and what it says of its `cache`.
    """

    def __init__(self, model: str, vllm: bool, cache: Mapping[str, str]) -> None:
        self._labels = {"model_name": model}
        self.registry = CollectorRegistry()
        if vllm:
            text, labels = "blocks of the KV cache, of block_size tokens in every row", [*cache, "engine"]
            info = Gauge("vllm:cache_config_info", text, labels, registry=self.registry)
            info.labels(**cache, engine="0").set(1)
        # Names begin so, and have these labels.
        self._spaces = {
            "winnow_": self._labels,
            **({"vllm:": self._labels | {"engine": "0"}} if vllm else {}),
        }
        self._histograms = {
            name: [
                Histogram(prefix + name, text, [*labels], buckets=buckets, registry=self.registry).labels(
                    **labels
                )
                for prefix, labels in self._spaces.items()
                if prefix == "winnow_" or name != "request_compression_ratio"  # vLLM has none
            ]
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.finished, self.refused = Counter[str](), Counter[str]()
        self._by_tenant = Counter[tuple[str, str]]()
        self._last_token: dict[str, float] = {}
        self._seen = Counter[str]()
        self._recent = {name: deque[float](maxlen=_RECENT) for name in _SHOWN}
        self.evicted_kvs = 0
        # By policy: answers, their tokens, and KVs kept of these, the mean over rows.
        self.kept: dict[str, tuple[int, int, float]] = {}
        self.prefix_queries = 0

    def _record(self, name: str, value: float) -> None:
        if name in self._recent:
            self._recent[name].append(value)
        for histogram in self._histograms[name]:
            histogram.observe(value)

    def observe(self, outputs: Iterable[RequestOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            name = output.request_id
            self._seen[name] += tokens
            if tokens:
                if (last := self._last_token.get(name)) is not None:
                    self._record("inter_token_latency_seconds", now - last)
                self._last_token[name] = now
            if output.finished:
                self._count_finished(output)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Count requests whose client has left, or that the engine gave up."""
        for name in request_ids:
            self._seen.pop(name, None)
            self._last_token.pop(name, None)
            self.finished["abort"] += 1

    def count_tokens(self, tenant: str | None, prompt: int, answers: int) -> None:
        self._by_tenant[tenant or "", "prompt"] += prompt
        self._by_tenant[tenant or "", "generation"] += answers

    def _count_finished(self, output: RequestOutput) -> None:
        generated = self._seen.pop(output.request_id, 0)
        self._last_token.pop(output.request_id, None)
        self.prefix_queries += len(output.prompt_token_ids)
        for answer in output.outputs:
            self.finished[answer.finish_reason or "error"] += 1
            report = answer.eviction
            tokens = len(output.prompt_token_ids) if report is None else report.num_tokens
            policy, kept = ("full", float(tokens)) if report is None else (report.policy, report.mean_kept)
            answers, before, before_kept = self.kept.get(policy, (0, 0, 0.0))
            self.kept[policy] = (answers + 1, before + tokens, before_kept + kept)
            if report is not None:
                self._record("request_compression_ratio", report.compression)
                rows = sum(len(layer) for layer in report.kept)
                self.evicted_kvs += max(0, report.num_tokens * rows - sum(map(sum, report.kept)))
        self._record("request_prompt_tokens", len(output.prompt_token_ids))
        self._record("request_generation_tokens", generated)
        self._record("request_params_n", len(output.outputs))
        for name, (begin, end) in _SPANS.items():
            began, ended = getattr(output.metrics, begin), getattr(output.metrics, end)
            if began is not None and ended is not None:
                self._record(name, ended - began)

    def latencies(self) -> dict[str, list[float]]:
        """Return the 50th, 90th and 99th percentile of the last requests' seconds, by what passed, if any."""
        return {
            shown: [float(each) for each in np.quantile(self._recent[name], _QUANTILES)]
            for name, shown in _SHOWN.items()
            if self._recent[name]
        }

    def render(self, stats: EngineStats, by_tenant: Mapping[str | None, tuple[int, int]]) -> bytes:
        snapshot: Any = SimpleNamespace(collect=lambda: self._families(stats, by_tenant))
        return bytes(generate_latest(snapshot)) + bytes(generate_latest(self.registry))

    def _families(
        self, stats: EngineStats, by_tenant: Mapping[str | None, tuple[int, int]]
    ) -> Iterator[Metric]:
        counters: _Numbers = {
            **read_counters(stats),
            "prefix_cache_queries": ("prompt tokens looked for in the prefix cache", self.prefix_queries),
        }
        own_gauges: _Numbers = {
            "expected_first_token_seconds": ("of the last that waits", stats.first_token_seconds),
            "kv_bytes_used": ("bytes of KV memory in use", stats.kv_bytes_used),
            "kv_bytes_peak": ("most bytes of KV memory in use so far", stats.kv_bytes_peak),
            "kv_bytes_budget": ("bytes of KV memory", stats.kv_bytes_budget),
            "host_bytes_used": ("bytes of KVs in host memory", stats.host_bytes_used),
            "image_bytes": ("bytes of what the vision tower made of pictures", stats.image_bytes),
            "host_bytes_budget": ("bytes that KVs may take in host memory", stats.host_bytes_budget),
            "kv_bytes_cached": ("bytes that only the prefix cache holds, free for use", stats.cached_bytes),
        }
        own_counters: _Numbers = {
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
            "sessions_outgrown": ("conversations larger than their session_memory", stats.sessions_outgrown),
            "sessions_dropped": ("conversations forgotten for their budgets", stats.sessions_dropped),
            "sessions_released": ("conversations that clients released", stats.sessions_released),
            "checked_answers": ("compressed answers compared with the full cache's", stats.agreement.checked),
            "checked_answers_equal": ("those that were equal", stats.agreement.equal),
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
        gauge, counter, own = GaugeMetricFamily, CounterMetricFamily, {"winnow_": self._labels}
        for kind, found, spaces in (
            (gauge, read_gauges(stats), self._spaces),
            (counter, counters, self._spaces),
            (gauge, own_gauges, own),
            (counter, own_counters, own),
        ):
            for prefix, labels in spaces.items():
                for name, (text, value) in found.items():
                    yield _family(kind, prefix + name, text, labels, [(value,)])
        for prefix, labels in self._spaces.items():
            ended, text = sorted(self.finished.items()), "answers that ended, by why"
            yield _family(counter, f"{prefix}request_success", text, labels, ended, "finished_reason")
        labels = self._labels
        text, refused = "requests answered 503 or 429, by what was full", sorted(self.refused.items())
        yield _family(counter, "winnow_requests_refused", text, labels, refused, "reason")
        text, tiers = "conversations, by where KVs lie", stats.sessions.items()
        yield _family(gauge, "winnow_sessions", text, labels, tiers, "tier")
        text = "tokens a second with drafts (drafted) and without, by the most sequences measured together"
        rates = [
            (str(each.most_running), kind, value)
            for each in stats.draft_rates
            for kind, value in (("plain", each.plain), ("drafted", each.drafted))
            if value is not None
        ]
        yield _family(gauge, "winnow_draft_tokens_per_second", text, labels, rates, "running", "kind")
        phases = [(phase, max(0.0, seconds)) for phase, seconds in sorted(stats.elapsed.items())]
        yield _family(counter, "winnow_engine_seconds", "of the engine, by phase", labels, phases, "phase")
        rows = [
            (tenant or "", state, count)
            for tenant, counts in by_tenant.items()
            for state, count in zip(("running", "waiting"), counts, strict=True)
        ]
        yield _family(gauge, "winnow_tenant_answers", "answers in progress", labels, rows, "tenant", "state")
        tokens = [(*key, count) for key, count in sorted(self._by_tenant.items())]
        yield _family(counter, "winnow_tenant_tokens", "tokens served", labels, tokens, "tenant", "kind")


def _family(
    kind: Any, name: str, text: str, labels: Mapping[str, str], rows: Iterable[tuple[Any, ...]], *more: str
) -> Metric:
    """Return metrics of one name: for each row the values of the labels `more`, and the number."""
    family: Metric = kind(name, text, labels=[*labels, *more])
    for *values, number in rows:
        family.add_metric([*labels.values(), *values], number)  # type: ignore[attr-defined]
    return family
