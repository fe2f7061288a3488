"""Report of a simulation: percentiles, goodput, tables, a chart, and a trace for chrome://tracing."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from winnow.values.units import format_bytes
from winnow_lab.plan.simulation import Served, Simulation
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANES = 64
_MICROSECONDS = 1e6
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, between neighbours in proportion; None: there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(
    simulation: Simulation, max_ttft: float | None = None, max_tpot: float | None = None
) -> dict[str, Any]:
    """Return all numbers by name, in seconds, tokens and bytes.

    Args:
        max_ttft, max_tpot: seconds; requests within both count for goodput. None: no limit.
    """
    served = [each for each in simulation.served if each.error is None]
    seconds = simulation.seconds
    output, prompt = (sum(values) for values in _tokens(served))
    good = [each for each in served if _within(each.ttft, max_ttft) and _within(each.tpot, max_tpot)]
    values: dict[str, Any] = {
        "requests": len(simulation.served),
        "failed": len(simulation.served) - len(served),
        "seconds": seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "output_rate": output / seconds if seconds else 0.0,
        "total_rate": (output + prompt) / seconds if seconds else 0.0,
        "request_rate": len(served) / seconds if seconds else 0.0,
        "goodput": len(good) / seconds if seconds else 0.0,
        "good_requests": len(good) / len(simulation.served) if simulation.served else 0.0,
        "steps": simulation.steps,
        "rounds": simulation.rounds,
        "preemptions": simulation.preemptions,
        "cached_tokens": simulation.cached_tokens,
        "kv_bytes": simulation.kv_bytes,
        "kv_bytes_peak": simulation.kv_bytes_peak,
        "host_bytes_peak": simulation.host_bytes_peak,
        "mean_running": statistics.fmean(s.running for each in simulation.histories for s in each)
        if any(simulation.histories)
        else 0.0,
    }
    values |= _times(served)
    names = {each.tenant: None for each in simulation.served if each.tenant is not None}
    values["tenants"] = {name: _of_tenant(simulation, name) for name in names}
    return values


def _times(served: Sequence[Served]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, read in _TIMES.items():
        found = [value for each in served if (value := read(each)) is not None]
        values[name] = {f"p{percent}": percentile(found, percent) for percent in PERCENTILES}
        values[name]["mean"] = statistics.fmean(found) if found else None
    return values


def _of_tenant(simulation: Simulation, tenant: str) -> dict[str, Any]:
    served = [each for each in simulation.served if each.tenant == tenant and each.error is None]
    last = max((each.finished for each in served if each.finished is not None), default=0.0)
    output = sum(each.output_tokens for each in served)
    counts = {"requests": len(served), "output_tokens": output, "output_rate": output / last if last else 0.0}
    return counts | _times(served)


_TIMES: dict[str, Callable[[Served], float | None]] = {
    "ttft": lambda each: each.ttft,
    "tpot": lambda each: each.tpot,
    "latency": lambda each: each.latency,
}


def _tokens(served: Sequence[Served]) -> tuple[list[int], list[int]]:
    return [each.output_tokens for each in served], [each.request.prompt_tokens for each in served]


def _within(value: float | None, most: float | None) -> bool:
    return most is None or value is None or value <= most


def simulation_tables(columns: Sequence[tuple[str, dict[str, Any]]]) -> list[TextTable]:
    """Return summaries beside each other: label and `summary` of each."""

    def row(name: str, read: Callable[[dict[str, Any]], str]) -> tuple[str, tuple[str, ...]]:
        return name, tuple(read(values) for _, values in columns)

    rows = [
        row("requests", lambda v: f"{v['requests']}"),
        row("failed", lambda v: f"{v['failed']}"),
        row("seconds", lambda v: f"{v['seconds']:.1f}"),
        row("new tokens/s", lambda v: f"{v['output_rate']:.1f}"),
        row("requests/s", lambda v: f"{v['request_rate']:.3f}"),
        row("goodput, requests/s", lambda v: f"{v['goodput']:.3f}"),
        row("within limits", lambda v: f"{v['good_requests']:.1%}"),
    ]
    for name in _TIMES:
        for key in (*(f"p{percent}" for percent in PERCENTILES), "mean"):
            rows.append(row(f"{name} {key}, s", lambda v, n=name, k=key: _number(v[n][k])))  # type: ignore[misc]
    rows += [
        row("running, mean", lambda v: f"{v['mean_running']:.1f}"),
        row("steps", lambda v: f"{v['steps']}"),
        row("rounds", lambda v: f"{v['rounds']}"),
        row("preemptions", lambda v: ", ".join(f"{n} {kind}" for kind, n in v["preemptions"].items())),
        row("prompt tokens from cache", lambda v: f"{v['cached_tokens']}"),
        row("host tier at most", lambda v: format_bytes(v["host_bytes_peak"])),
        row("KVs at most", lambda v: f"{format_bytes(v['kv_bytes_peak'])} of {format_bytes(v['kv_bytes'])}"),
    ]
    tables = [TextTable("Simulated", "", tuple(label for label, _ in columns), tuple(rows))]
    tenants = [
        (f"{label}, {name}" if len(columns) > 1 else name, own)
        for label, values in columns
        for name, own in values["tenants"].items()
    ]
    if tenants:
        tables.append(_tenant_table(tenants))
    return tables


def _tenant_table(tenants: Sequence[tuple[str, dict[str, Any]]]) -> TextTable:
    times = [(name, f"p{percent}") for name in ("ttft", "latency") for percent in (50, 99)]
    rows = tuple(
        (
            label,
            (
                f"{own['requests']}",
                f"{own['output_rate']:.1f}",
                *(_number(own[name][key]) for name, key in times),
            ),
        )
        for label, own in tenants
    )
    columns = ("requests", "new tokens/s", *(f"{name} {key}, s" for name, key in times))
    return TextTable("By tenant", "", columns, rows, ("New tokens/s: up to the tenant's own last token.",))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def occupancy_figure(simulation: Simulation, title: str) -> "Figure":
    """Return KV bytes and sequences over time, a line for each replica.

    Raises:
        WinnowError: matplotlib is not installed.
    """
    kvs, running = [], []
    for number, history in enumerate(simulation.histories):
        times = [sample.time for sample in history]
        kvs.append(Line(f"replica {number}", times, [sample.used_bytes / 2**30 for sample in history]))
        if any(sample.host_bytes for sample in history):
            host = [sample.host_bytes / 2**30 for sample in history]
            kvs.append(Line(f"replica {number}, host", times, host))
        running.append(Line(f"replica {number}", times, [float(sample.running) for sample in history]))
    time = Axis("seconds")
    return line_chart(
        [
            Panel("KVs", time, Axis("GiB", low=0, high=simulation.kv_bytes / 2**30), kvs),
            Panel("running", time, Axis("sequences", low=0), running),
        ],
        title,
    )


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Return the run as trace events: requests as spans of waiting, prompt and answer; counters of sequences, KVs."""
    return {"traceEvents": [*_spans(simulation.served), *_counters(simulation)], "displayTimeUnit": "ms"}


def _spans(served: Sequence[Served]) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(served):
        moments = (each.request.arrival, each.scheduled, each.first_token, each.finished)
        for name, start, end in zip(("wait", "prompt", "answer"), moments, moments[1:], strict=False):
            if start is not None and end is not None:
                yield {
                    "name": name,
                    "cat": "request",
                    "ph": "X",
                    "ts": start * _MICROSECONDS,
                    "dur": (end - start) * _MICROSECONDS,
                    "pid": each.replica,
                    "tid": number % _LANES,
                    "args": {
                        "request": number,
                        "prompt": each.request.prompt_tokens,
                        "new": each.output_tokens,
                    },
                }


def _counters(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for replica, history in enumerate(simulation.histories):
        for sample in history:
            shared = {"ph": "C", "ts": sample.time * _MICROSECONDS, "pid": replica}
            yield shared | {
                "name": "sequences",
                "args": {"running": sample.running, "waiting": sample.waiting},
            }
            yield shared | {
                "name": "KV bytes",
                "args": {"device": sample.used_bytes, "host": sample.host_bytes},
            }
