"""A recorded load on an engine that has too little memory for it, under one setting after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from winnow.llm import LLM
from winnow_lab.bench.answering import OnStep, answer_all, fixed_length
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.report import percentile
from winnow_lab.report.tables import TextTable

_WARM_UP_TOKENS = 8
_COUNTERS = (
    "generated_tokens",
    "prompt_tokens",
    "cached_tokens",
    "num_preemptions",
    "num_steps",
    "num_rounds",
    "kv_bytes_freed",
)


@dataclass(frozen=True)
class PlayedTrace:
    """Outcome of a load under one setting.

    Attributes:
        seconds: from the first arrival to the last token.
        running: requests that held KVs, of each step.
        latencies: seconds from arrival to last token, of each request.
        first_tokens: seconds from arrival to first token.
        counted: what happened meanwhile, by the names of `EngineStats`.
    """

    name: str
    seconds: float
    refused: int
    running: tuple[int, ...]
    latencies: tuple[float, ...]
    first_tokens: tuple[float, ...]
    counted: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def output_rate(self) -> float:
        return self.counted["generated_tokens"] / self.seconds

    @property
    def preemptions_a_minute(self) -> float:
        return 60 * self.counted["num_preemptions"] / self.seconds

    @property
    def mean_running(self) -> float:
        return sum(self.running) / len(self.running)

    def to_json(self) -> dict[str, Any]:
        derived = ("output_rate", "preemptions_a_minute", "mean_running")
        values = asdict(self) | {"counted": dict(self.counted)}
        del values["running"]
        return values | {name: getattr(self, name) for name in derived} | {"most_running": max(self.running)}


def play(
    llm: LLM,
    name: str,
    load: Sequence[TraceRequest],
    vocab_size: int,
    seed: int = 0,
    on_step: OnStep = lambda done, stats: None,
) -> PlayedTrace:
    """Submit requests when they arrive, and step until all are done. Their answers have the trace's length."""
    llm.generate([1] * _WARM_UP_TOKENS, fixed_length(2))
    requests = [
        (each.prompt(vocab_size, seed + index), fixed_length(each.output_tokens))
        for index, each in enumerate(load)
    ]
    arrivals = [each.arrival for each in load]
    done = answer_all(llm, requests, on_step, final_only=True, arrivals=arrivals, skip_refused=True)
    metrics = [output.metrics for output in done.outputs]
    return PlayedTrace(
        name,
        done.seconds,
        done.refused,
        done.running,
        tuple(each.latency or 0.0 for each in metrics),
        tuple(each.time_to_first_token or 0.0 for each in metrics),
        {counter: done.counted(counter) for counter in _COUNTERS},
    )


def pressure_table(played: Sequence[PlayedTrace], title: str, corner: str, notes: Sequence[str]) -> TextTable:
    rows = tuple(
        (
            each.name,
            (
                f"{each.mean_running:.1f}",
                f"{max(each.running)}",
                f"{each.output_rate:,.1f}",
                f"{each.preemptions_a_minute:.1f}",
                f"{each.counted['prompt_tokens']:,.0f}",
                *(f"{percentile(each.first_tokens, percent):.2f}" for percent in (50, 99)),
                *(f"{percentile(each.latencies, percent):.2f}" for percent in (50, 99)),
                f"{each.refused}",
            ),
        )
        for each in played
    )
    columns = ("batch, mean", "most", "output tokens/s", "preemptions/min", "prompt tokens computed")
    times = ("first token p50, s", "p99", "latency p50, s", "p99")
    return TextTable(title, corner, (*columns, *times, "refused"), rows, tuple(notes)).upright()
