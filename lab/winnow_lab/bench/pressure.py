"""A recorded load on an engine that has too little memory for it, under one setting after the other."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from winnow.errors import CapacityError, ContextLengthError
from winnow.llm import LLM
from winnow.outputs import EngineStats, RequestOutput
from winnow_lab.bench.answering import fixed_length
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.report.plots import Axis, Line, Panel
from winnow_lab.report.tables import TextTable

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class PlayedTrace:
    """Outcome of a load under one setting.

    Attributes:
        seconds: from the first arrival to the last token.
        refused: requests that could never fit.
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
        """Output tokens per second."""
        return self.counted["generated_tokens"] / self.seconds

    @property
    def preemptions_a_minute(self) -> float:
        return 60 * self.counted["num_preemptions"] / self.seconds

    @property
    def mean_running(self) -> float:
        return sum(self.running) / len(self.running)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of its line, and those that they come from."""
        derived = ("output_rate", "preemptions_a_minute", "mean_running")
        values = asdict(self) | {"counted": dict(self.counted)}
        del values["running"]
        return values | {name: getattr(self, name) for name in derived} | {"most_running": max(self.running)}


_COUNTERS = (
    "generated_tokens",
    "prompt_tokens",
    "cached_tokens",
    "num_preemptions",
    "num_steps",
    "num_rounds",
    "kv_bytes_freed",
)


def play(
    llm: LLM,
    name: str,
    load: Sequence[TraceRequest],
    vocab_size: int,
    seed: int = 0,
    on_step: Callable[[int, EngineStats], None] = lambda done, stats: None,
) -> PlayedTrace:
    """Submit requests when they arrive, and step until all are done. Their answers have the trace's length.

    Args:
        on_step: called after each step with the number of requests that are done.
    """
    llm.generate([1] * _WARM_UP_TOKENS, fixed_length(2))
    arrivals = deque(
        (each.arrival, each.prompt(vocab_size, seed + index), fixed_length(each.output_tokens))
        for index, each in enumerate(load)
    )
    before, start = llm.stats(), time.perf_counter()
    finished: list[RequestOutput] = []
    running, refused = [], 0
    while arrivals or llm.has_unfinished:
        while arrivals and arrivals[0][0] <= time.perf_counter() - start:
            _, prompt, params = arrivals.popleft()
            try:
                llm.submit(prompt, params, final_only=True)
            except (CapacityError, ContextLengthError):
                refused += 1
        if not llm.has_unfinished:
            if arrivals:
                time.sleep(max(arrivals[0][0] - (time.perf_counter() - start), 0.0))
            continue
        outputs = llm.step()
        for output in outputs:
            output.raise_for_error()
        finished += outputs
        stats = llm.stats()
        # Those that ended with a step held KVs in it.
        running.append(stats.num_running + len(outputs))
        on_step(len(finished) + refused, stats)
    seconds, after = time.perf_counter() - start, llm.stats()
    return PlayedTrace(
        name,
        seconds,
        refused,
        tuple(running) or (0,),
        tuple(output.metrics.latency or 0.0 for output in finished),
        tuple(output.metrics.time_to_first_token or 0.0 for output in finished),
        {counter: getattr(after, counter) - getattr(before, counter) for counter in _COUNTERS},
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else math.nan


def pressure_table(
    played: Sequence[PlayedTrace], title: str, corner: str, notes: tuple[str, ...]
) -> TextTable:
    """Return a line per setting: batch, throughput, preemptions, latencies."""
    columns = (
        "batch, mean",
        "most",
        "output tokens/s",
        "preemptions/min",
        "prompt tokens computed",
        "first token p50, s",
        "p99",
        "latency p50, s",
        "p99",
        "refused",
    )
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
    return TextTable(title, corner, columns, rows, notes)


def pressure_panels(played: Sequence[PlayedTrace]) -> list[Panel]:
    """Return the throughput, preemptions and latencies by line of the table, for `line_chart`."""
    places = list(range(len(played)))
    x = Axis(" | ".join(each.name for each in played))

    def line(label: str, read: Callable[[PlayedTrace], float]) -> Line:
        return Line(label, places, [read(each) for each in played])

    return [
        Panel("throughput", x, Axis("output tokens/s", low=0), [line("tokens/s", lambda r: r.output_rate)]),
        Panel(
            "preemptions",
            x,
            Axis("a minute", low=0),
            [line("preemptions", lambda each: each.preemptions_a_minute)],
        ),
        Panel(
            "latency",
            x,
            Axis("seconds", low=0),
            [
                line("p50", lambda each: percentile(each.latencies, 50)),
                line("p99", lambda each: percentile(each.latencies, 99)),
            ],
        ),
    ]
