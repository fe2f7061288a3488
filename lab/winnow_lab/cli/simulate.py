"""`winnow simulate`: a trace through the engine on hardware that is not there."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.options import add_model_argument, require_model
from winnow.cli.flags.paths import require_writable, write_json, write_text
from winnow.config import PREFIX_DISK
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.json_values import dump_json
from winnow.values.tenants import OTHERS
from winnow.values.units import parse_bytes
from winnow_lab.bench.traces import read_trace, scaled
from winnow_lab.cli.plan import DeviceOptions, add_engine_parts, deployments
from winnow_lab.report.tables import console, print_tables
from winnow_lab.study import flag
from winnow_lab.study.options import add_options, flag_of, options_of

if TYPE_CHECKING:
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
  winnow simulate llama-3-8b --gpu L4 --trace conv.csv --scheduling-policy fair --tenants tenants.json
  winnow simulate llama-3-70b --gpu H100 --gpus 4 --replicas 4 --routing prefix --trace mooncake.jsonl
"""
_ROUTING = ("round-robin", "least-loaded", "prefix")
_AMOUNTS = ("kv_memory", "kv_offloading_size", "prefix_store", *PREFIX_DISK)
"""Options of the cache that a simulation has defaults of its own for, or no use."""


@dataclass(frozen=True)
class Options(DeviceOptions):
    trace: Path = flag(text="requests: .csv or .jsonl")
    limit: int | None = flag(None, "requests of the trace (default: all)", least=1)
    rate: float = flag(1.0, "times as dense as the trace")
    scale_tokens: float = flag(1.0, "lengths, times those of the trace")
    replicas: int = flag(1, "engines, each on devices of its own", least=1)
    routing: str = flag("round-robin", "which engine gets a request", choices=_ROUTING)
    kv_memory: int | None = flag(None, "of each engine (default: all that weights leave)", parse=parse_bytes)
    kv_offloading_size: int | None = flag(
        None, "host memory of each engine, for preempted requests", parse=parse_bytes
    )
    max_model_len: int | None = flag(None, "longest prompt and answer (default: the model's)", least=1)
    max_ttft: float | None = flag(None, "seconds to the first token, within which a request is good", least=0)
    max_tpot: float | None = flag(None, "seconds per token after it, within which a request is good", least=0)
    all_rows: bool = flag(
        False, "keep the books of every row; else one stands for all, exact where rows keep alike"
    )
    chrome_trace: Path | None = flag(None, "write a trace for chrome://tracing")
    plot: Path | None = flag(None, "draw KVs over time as STEM.svg", metavar="STEM")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chrome_trace", "plot"):
            if (path := getattr(self, name)) is not None:
                require_writable(path, f"{flag_of(name)} {path}")
        if not self.trace.is_file():
            raise UsageError(f"--trace must be a file, got {str(self.trace)!r}")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow simulate MODEL --trace FILE [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_model_argument(parser, "as for winnow plan", flag=True)
    add_options(parser, Options)
    add_engine_parts(parser, _AMOUNTS)


def execute(namespace: argparse.Namespace) -> int:
    require_model(namespace, "simulate")
    options = options_of(Options, namespace)
    trace = scaled(read_trace(options.trace, options.limit), tokens=options.scale_tokens, rate=options.rate)
    from winnow_lab.plan.simulated_engine import EngineSetup
    from winnow_lab.plan.simulation import ROUTERS, simulate
    from winnow_lab.plan.simulation_report import chrome_trace, occupancy_figure, simulation_tables, summary
    from winnow_lab.report.plots import save_figure

    shares = any(request.hash_ids for request in trace)
    columns: list[tuple[str, dict[str, Any]]] = []
    found = deployments(namespace, options)
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
        router = ROUTERS[options.routing]()
        names = tuple(tenant.name for tenant in deployment.scheduler.tenants if tenant.name != OTHERS)
        simulation = simulate(deployment, setup, trace, options.replicas, router, tenants=names or (None,))
        values = summary(simulation, options.max_ttft, options.max_tpot)
        values["simulated_in"] = time.perf_counter() - start
        columns.append((_label(deployment, found), values | {"deployment": deployment.to_json()}))
        if deployment is found[0]:  # pictures are of the first one
            if options.chrome_trace is not None:
                write_text(options.chrome_trace, dump_json(chrome_trace(simulation)), "--chrome-trace")
            if options.plot is not None:
                save_figure(occupancy_figure(simulation, columns[0][0]), options.plot)
    print_tables(console(), simulation_tables(columns), dense=True)
    simulations = [{"label": label} | values for label, values in columns]
    write_json(options.json, {"command": typed_command(), "simulations": simulations})
    return 0


def _label(deployment: "Deployment", found: "list[Deployment]") -> str:
    policies = {each.eviction.chosen for each in found}
    device = f"{deployment.gpus} x {deployment.hardware.name}"
    return f"{device}, {deployment.eviction.chosen}" if len(policies) > 1 else device
