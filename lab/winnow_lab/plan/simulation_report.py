"""Report of a simulation: percentiles, goodput, tables, a chart, and a trace for chrome://tracing."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from winnow.values.units import format_bytes
from winnow_lab.plan.simulation import Served, Simulation
from winnow_lab.report import percentile
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANES = 64
_MICROSECONDS = 1e6
PERCENTILES = (50, 90, 99)
_TIMES = ("ttft", "tpot", "latency")


def summary(
    simulation: Simulation, max_ttft: float | None = None, max_tpot: float | None = None
) -> dict[str, Any]:
    """All numbers by name, in seconds, tokens and bytes.

    Args:
        max_ttft, max_tpot: seconds; requests within both count for goodput. None: no limit.
    """
    served = [each for each in simulation.served if each.error is None]
    seconds = simulation.seconds
    output = sum(each.output_tokens for each in served)
    prompt = sum(each.request.prompt_tokens for each in served)
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
    for name in _TIMES:
        found = [value for each in served if (value := getattr(each, name)) is not None]
        values[name] = {f"p{each}": percentile(found, each) if found else None for each in PERCENTILES}
        values[name]["mean"] = statistics.fmean(found) if found else None
    return values


def _of_tenant(simulation: Simulation, tenant: str) -> dict[str, Any]:
    served = [each for each in simulation.served if each.tenant == tenant and each.error is None]
    last = max((each.finished for each in served if each.finished is not None), default=0.0)
    output = sum(each.output_tokens for each in served)
    counts = {"requests": len(served), "output_tokens": output, "output_rate": output / last if last else 0.0}
    return counts | _times(served)


def _within(value: float | None, most: float | None) -> bool:
    return most is None or value is None or value <= most


def simulation_tables(columns: Sequence[tuple[str, dict[str, Any]]]) -> list[TextTable]:
    """Summaries beside each other: label and `summary` of each."""
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "requests": lambda v: f"{v['requests']}",
        "failed": lambda v: f"{v['failed']}",
        "seconds": lambda v: f"{v['seconds']:.1f}",
        "new tokens/s": lambda v: f"{v['output_rate']:.1f}",
        "requests/s": lambda v: f"{v['request_rate']:.3f}",
        "goodput, requests/s": lambda v: f"{v['goodput']:.3f}",
        "within limits": lambda v: f"{v['good_requests']:.1%}",
    }
    keys = (*(f"p{percent}" for percent in PERCENTILES), "mean")
    rows |= {f"{name} {key}, s": _time(name, key) for name in _TIMES for key in keys}
    rows |= {
        "running, mean": lambda v: f"{v['mean_running']:.1f}",
        "steps": lambda v: f"{v['steps']}",
        "rounds": lambda v: f"{v['rounds']}",
        "preemptions": lambda v: ", ".join(f"{n} {kind}" for kind, n in v["preemptions"].items()),
        "prompt tokens from cache": lambda v: f"{v['cached_tokens']}",
        "host tier at most": lambda v: format_bytes(v["host_bytes_peak"]),
        "KVs at most": lambda v: f"{format_bytes(v['kv_bytes_peak'])} of {format_bytes(v['kv_bytes'])}",
    }
    tables = [TextTable.of("Simulated", "", columns, rows).transposed()]
    tenants = [
        (f"{label}, {name}" if len(columns) > 1 else name, own)
        for label, values in columns
        for name, own in values["tenants"].items()
    ]
    if tenants:
        times = [(name, f"p{percent}") for name in ("ttft", "latency") for percent in (50, 99)]
        own_columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "requests": lambda own: f"{own['requests']}",
            "new tokens/s": lambda own: f"{own['output_rate']:.1f}",
            **{f"{name} {key}, s": _time(name, key) for name, key in times},
        }
        note = "New tokens/s: up to the tenant's own last token."
        tables.append(TextTable.of("By tenant", "", tenants, own_columns, [note]))
    return tables


def _time(name: str, key: str) -> Callable[[dict[str, Any]], str]:
    return lambda values: "" if values[name][key] is None else f"{values[name][key]:.4g}"


def occupancy_figure(simulation: Simulation, title: str) -> "Figure":
    """KV bytes and sequences over time, a line for each replica."""
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
    """The run as trace events: requests as spans of waiting, prompt and answer; counters of sequences, KVs."""
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
