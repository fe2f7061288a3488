"""`winnow simulate`: a trace through the engine on hardware that is not there."""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import COMMON
from winnow.cli.flags.options import add_flags, add_model_argument, given, require_model
from winnow.cli.flags.paths import check_json_path, require_writable, write_json, write_text
from winnow.config import PREFIX_DISK, CacheConfig, EvictionConfig, SchedulerConfig, option
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.checks import check_integer, check_number
from winnow.values.json_values import dump_json
from winnow.values.tenants import OTHERS
from winnow.values.units import parse_bytes
from winnow_lab.cli.plan import PlanOptions, add_hardware_flags, deployments
from winnow_lab.report.console import console, print_tables

if TYPE_CHECKING:
    from winnow_lab.bench.traces import TraceRequest
    from winnow_lab.plan.deployment import Deployment

DESCRIPTION = """\
Serve a trace of requests with the engine's own loop, scheduler, queue, admission and ledger, on a
virtual clock: an executor that only tells time stands in for the model. MODEL and devices are those
of `winnow plan`. Traces are Azure's .csv or Mooncake's .jsonl files (winnow_lab.bench.traces). Where
--tenants names some, requests run on their accounts in turn.
"""
EPILOG = """\
examples:
  winnow simulate llama-3-8b --gpu L4 --trace AzureLLMInferenceTrace_conv.csv --limit 2000
  winnow simulate llama-3-8b --gpu L4 --trace conv.csv --eviction full,kv-compress-pd --compression 4
  winnow simulate llama-3-8b --gpu L4 --trace conv.csv --scheduling-policy fair --tenants tenants.json
  winnow simulate llama-3-70b --gpu H100 --gpus 4 --replicas 4 --routing prefix --trace mooncake.jsonl
"""


_COMMON = ("limit", "rate", "replicas", "kv_memory", "gpu", "gpus")
_AMOUNTS = ("kv_memory", "kv_offloading_size", "prefix_store", *PREFIX_DISK)
"""Options of the cache that a simulation has defaults of its own for, or no use."""


@dataclass(frozen=True)
class SimulateOptions:
    """The trace, the fleet and what is asked of it."""

    limit: int | None = option(None, "requests of the trace; left out: all")
    repeat_trace: int = option(1, "times the trace is served, one behind the other")
    rate: float = option(1.0, "times as dense as the trace")
    scale_tokens: float = option(1.0, "lengths, times those of the trace")
    replicas: int = option(1, "engines, each on devices of its own")
    routing: str = option(
        "round-robin",
        "which engine gets a request: round-robin, least-loaded, prefix",
        choices=("round-robin", "least-loaded", "prefix"),
    )
    kv_memory: int | None = option(
        None, "KV memory of each engine; left out: all that weights leave", parse=parse_bytes
    )
    kv_offloading_size: int | None = option(
        None, "host memory of each engine for KVs of preempted requests; left out: none", parse=parse_bytes
    )
    max_model_len: int | None = option(None, "longest prompt and answer; left out: the model's")
    max_ttft: float | None = option(None, "seconds to the first token, within which a request is good")
    max_tpot: float | None = option(None, "seconds per token after it, within which a request is good")
    all_rows: bool = option(
        False, "keep the books of every row; else one stands for all, which is exact where rows keep alike"
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow simulate MODEL --trace FILE [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser, "as for winnow plan", flag=True)
    parser.add_argument("--trace", metavar="FILE", type=Path, required=True, help="requests: .csv or .jsonl")
    add_hardware_flags(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all numbers as JSON too")
    parser.add_argument(
        "--chrome-trace", metavar="FILE", type=Path, help="write a trace for chrome://tracing"
    )
    parser.add_argument("--plot", metavar="STEM", type=Path, help="draw KVs over time as STEM.svg")
    add_flags(parser, SimulateOptions, "the simulation", common=_COMMON)
    add_flags(
        parser, PlanOptions, "the deployment", ("batch", "context", "new_tokens", "price"), common=_COMMON
    )
    add_flags(parser, CacheConfig, "how KVs are stored", skip=_AMOUNTS, common=COMMON)
    add_flags(parser, EvictionConfig, "eviction; several policies: commas between", common=COMMON)
    add_flags(parser, SchedulerConfig, "a step", common=COMMON)


def execute(namespace: argparse.Namespace) -> int:
    """Simulate, show, and return the exit code."""
    require_model(namespace, "simulate")
    options = SimulateOptions(**given(namespace, SimulateOptions))
    _check(options)
    check_json_path(namespace.json)
    for name in ("chrome_trace", "plot"):
        path = getattr(namespace, name)
        if path is not None:
            require_writable(path, f"--{name.replace('_', '-')} {path}")
    if not namespace.trace.is_file():
        raise UsageError(f"--trace must be a file, got {str(namespace.trace)!r}")
    trace = read(namespace.trace, options)
    from winnow_lab.plan.routing import make_router
    from winnow_lab.plan.simulated_engine import EngineSetup
    from winnow_lab.plan.simulation import simulate
    from winnow_lab.plan.simulation_report import chrome_trace, occupancy_figure, simulation_tables, summary
    from winnow_lab.report.plots import save_figure

    shares = any(request.hash_ids for request in trace)
    columns: list[tuple[str, dict[str, Any]]] = []
    found = deployments(namespace, PlanOptions(**given(namespace, PlanOptions)))
    for deployment in found:
        setup = EngineSetup.of(
            deployment,
            options.kv_memory,
            options.max_model_len,
            prefix_caching=shares and deployment.cache.enable_prefix_caching,
            host_bytes=options.kv_offloading_size or 0,
            fold=not options.all_rows,
        )
        start = time.perf_counter()
        router = make_router(options.routing)
        names = tuple(tenant.name for tenant in deployment.scheduler.tenants if tenant.name != OTHERS)
        simulation = simulate(deployment, setup, trace, options.replicas, router, tenants=names or (None,))
        values = summary(simulation, options.max_ttft, options.max_tpot)
        values["simulated_in"] = time.perf_counter() - start
        columns.append((_label(deployment, found), values | {"deployment": deployment.to_json()}))
        if deployment is found[0]:  # pictures are of the first one
            if namespace.chrome_trace is not None:
                write_text(namespace.chrome_trace, dump_json(chrome_trace(simulation)), "--chrome-trace")
            if namespace.plot is not None:
                save_figure(occupancy_figure(simulation, columns[0][0]), namespace.plot)
    print_tables(console(), simulation_tables(columns), dense=True)
    write_json(
        namespace.json,
        {"command": typed_command(), "simulations": [{"label": n} | v for n, v in columns]},
    )
    return 0


def read(path: Path, options: SimulateOptions) -> "list[TraceRequest]":
    """Return the trace as the options want it.

    Raises:
        ConfigError: it cannot be read.
    """
    from winnow_lab.bench.traces import read_trace, scaled

    trace = scaled(read_trace(path, options.limit), tokens=options.scale_tokens, rate=options.rate)
    length = trace[-1].arrival + trace[-1].arrival / max(len(trace) - 1, 1)
    return [
        replace(request, arrival=request.arrival + length * turn)
        for turn in range(options.repeat_trace)
        for request in trace
    ]


def _check(options: SimulateOptions) -> None:
    for name in ("limit", "max_model_len"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name), 1)
    check_integer("repeat_trace", options.repeat_trace, 1, 10_000)
    check_integer("replicas", options.replicas, 1, 1024)
    for name in ("max_ttft", "max_tpot"):
        if getattr(options, name) is not None:
            check_number(name, getattr(options, name), 0.0)


def _label(deployment: "Deployment", found: "list[Deployment]") -> str:
    policies = {each.eviction.chosen for each in found}
    device = f"{deployment.gpus} x {deployment.hardware.name}"
    return f"{device}, {deployment.eviction.chosen}" if len(policies) > 1 else device
