"""How near predicted times come to measured ones, on this machine: shapes that the fit has not seen, W1, and a trace.

    python -m winnow_lab.speed.calibration measure PART --folder DIR      PART: hardware, fit, held-out, w1, trace
    python -m winnow_lab.speed.calibration report --folder DIR [--json FILE]

Each part is measured in some minutes and leaves JSON files in the folder: those of `fit` and `held-out` are what
`winnow bench throughput --json` writes, and `winnow plan --calibrate` reads. `report` fits the factors to the first,
and predicts the others. Of several passes the fastest counts, since whatever else runs only adds. The model is W1's, a
Llama of 107 million random parameters in bfloat16.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from winnow import LLM
from winnow.cli.flags.paths import write_json
from winnow.config import EngineConfig
from winnow.report.provenance import Machine, report_head, typed_command
from winnow_lab.bench.kv_memory import kv_memory_for
from winnow_lab.bench.presets import PRESETS, model_cache
from winnow_lab.bench.pressure import play
from winnow_lab.bench.throughput import measure_throughput
from winnow_lab.bench.traces import TraceRequest, read_trace, scaled
from winnow_lab.bench.workload import Workload
from winnow_lab.plan.calibrate import calibrate, read_run, run_errors, work_of
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import Hardware, this_machine
from winnow_lab.plan.models import find_model
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.simulation import simulate
from winnow_lab.plan.step_time import Factors
from winnow_lab.report.tables import TextTable
from winnow_lab.study import Result, StudyOptions, flag, run_study

W1 = PRESETS["w1"]
FIT = (
    # requests, prompt, new tokens, compression under batch-max
    (1, 64, 96, None),
    (4, 256, 64, None),
    (8, 1024, 48, None),
    (16, 512, 48, None),
    (32, 128, 64, None),
    (2, 3000, 32, None),
    (32, 512, 32, None),
    (8, 1024, 64, 4),
)
HELD_OUT = (
    (3, 700, 80, None),
    (12, 300, 60, None),
    (24, 96, 96, None),
    (6, 1500, 40, None),
    (20, 800, 40, None),
    (1, 2000, 64, None),
    (12, 1200, 48, 4),
)
PASSES = 3
TRACE_REQUESTS, TRACE_TOKENS, TRACE_RATE = 100, 0.5, 1.2
"""Requests of the trace, their lengths and arrivals times those of the trace."""
SERVED = ("seconds", "output_rate", "latency", "first_token")
PARTS = ("hardware", "fit", "held-out", "w1", "trace")


@dataclass(frozen=True)
class Options(StudyOptions):
    """What is done, and where files lie."""

    action: str = flag(positional=True, choices=("measure", "report"))
    part: str | None = flag(None, positional=True, choices=PARTS)
    folder: Path = flag()
    trace: Path = flag(Path("AzureLLMInferenceTrace_conv.csv"))


def options(compression: int | None, kv_seqs: int, tokens: int) -> dict[str, Any]:
    """The engine's, with KV memory for `kv_seqs` sequences."""
    own: dict[str, Any] = {
        "model": str(W1.shape.save(model_cache())),
        "dtype": W1.dtype,
        "enable_prefix_caching": False,
    }
    if compression is not None:
        own |= {"eviction": "batch-max", "compression": compression}
    return own | {"kv_memory": kv_memory_for(EngineConfig.from_options(own), kv_seqs, tokens)}


@contextmanager
def engines() -> Iterator[Any]:
    """Opens engines, one at a time: runs with equal options share one."""
    opened: list[tuple[dict[str, Any], LLM]] = []

    def open_engine(own: dict[str, Any]) -> LLM:
        if not opened or opened[0][0] != own:
            for _, llm in opened:
                llm.close()
            opened[:] = [(own, LLM(**own))]
        return opened[0][1]

    try:
        yield open_engine
    finally:
        for _, llm in opened:
            llm.close()


def measure_shapes(shapes: Sequence[tuple[int, int, int, int | None]], name: str, folder: Path) -> None:
    """A report of `winnow bench throughput` for each shape."""
    head = report_head(typed_command(), Machine.here())
    with engines() as open_engine:
        for index, (requests, prompt, new, compression) in enumerate(shapes):
            own = options(compression, 24, 1024)
            report = measure_throughput(
                open_engine(own),
                Workload(requests, prompt, new),
                W1.shape.vocab_size,
                PASSES,
                lambda *_: None,
            )
            write_json(folder / f"{name}-{index}.json", head | {"engine": own} | report.to_json())


def measure_load(name: str, load: Sequence[TraceRequest], kv_seqs: int, times: int, folder: Path) -> None:
    """Serve a load some times, with the full cache and at compression 4."""
    head = report_head(typed_command(), Machine.here())
    for compression in (None, 4):
        own = options(compression, kv_seqs, W1.workload.sequence_tokens)
        with LLM(**own) as llm:
            runs = [play(llm, name, load, llm.vocab_size) for _ in range(times)]
        values = {
            "seconds": min(run.seconds for run in runs),
            "output_rate": max(run.output_rate for run in runs),
            "latency": min(statistics.fmean(run.latencies) for run in runs),
            "first_token": min(statistics.fmean(run.first_tokens) for run in runs),
        }
        file = folder / f"{name}-{compression or 1}x.json"
        write_json(file, head | {"engine": own, "runs": [run.to_json() for run in runs], "best": values})


def w1_load() -> list[TraceRequest]:
    return [TraceRequest(0.0, W1.workload.prompt_tokens, W1.workload.new_tokens)] * W1.workload.requests


def trace_load(path: Path) -> list[TraceRequest]:
    requests = read_trace(path, 2 * TRACE_REQUESTS)
    return scaled(requests, tokens=TRACE_TOKENS, rate=TRACE_RATE, longest=2000)[:TRACE_REQUESTS]


def measure(part: str, folder: Path, trace: Path) -> None:
    """Measure a part."""
    folder.mkdir(parents=True, exist_ok=True)
    if part == "hardware":
        write_json(folder / "hardware.json", this_machine(W1.dtype).to_json())
    elif part in ("fit", "held-out"):
        measure_shapes(FIT if part == "fit" else HELD_OUT, part, folder)
    elif part == "w1":
        measure_load("w1", w1_load(), W1.kv_seqs, 1, folder)
    else:
        measure_load("trace", trace_load(trace), W1.kv_seqs, 1, folder)


def predict_load(
    values: Mapping[str, Any], load: Sequence[TraceRequest], hardware: Hardware, factors: Factors
) -> dict[str, float]:
    """What the simulator makes of a load."""
    config = EngineConfig.from_options(values["engine"])
    deployment = Deployment(
        find_model(values["engine"]["model"]),
        hardware,
        dtype=config.model.dtype,
        cache=config.cache,
        eviction=config.eviction,
        scheduler=config.scheduler,
        factors=factors,
    )
    setup = EngineSetup.of(deployment, config.cache.kv_memory, prefix_caching=False)
    simulation = simulate(deployment, setup, load)
    served = simulation.served
    return {
        "seconds": simulation.seconds,
        "output_rate": sum(each.output_tokens for each in served) / simulation.seconds,
        "latency": statistics.fmean(each.latency for each in served if each.latency is not None),
        "first_token": statistics.fmean(each.ttft for each in served if each.ttft is not None),
    }


def report(folder: Path, trace: Path) -> Result:
    """Fit, predict, and compare."""
    hardware = Hardware(**json.loads((folder / "hardware.json").read_text()))
    fitted = calibrate(sorted(folder.glob("fit-*.json")), hardware)
    shapes = [(Path(source), errors, "fit") for source, errors in fitted.errors]
    for path in sorted(folder.glob("held-out-*.json")):
        run = read_run(path, hardware)
        shapes.append((path, run_errors(run, work_of(run), fitted.factors), "held out"))
    rows, found = [], []
    for path, errors, kind in shapes:
        run = read_run(path, hardware)
        label = f"{run.workload.requests} x {run.workload.prompt_tokens} + {run.workload.new_tokens}"
        if run.deployment.eviction.compression is not None:
            label += f", {run.deployment.eviction.compression}x"
        rows.append((f"{label} ({kind})", tuple("" if each is None else f"{each:+.1%}" for each in errors)))
        measured = dict(
            zip(("seconds", "first_token_seconds", "decode_step_seconds"), run.times, strict=True)
        )
        found.append({"shape": label, "kind": kind, "measured": measured, "errors": errors})
    held = [
        abs(each) for _, errors, kind in shapes if kind == "held out" for each in errors if each is not None
    ]
    tables = [
        TextTable(
            "Runs: predicted over measured seconds, less 1",
            "requests x prompt + new tokens",
            ("whole run", "first token", "decode step"),
            tuple(rows),
            (f"Held out: mean {statistics.fmean(held):.1%}, most {max(held):.1%}.",),
        )
    ]
    loads, lines = [], []
    for path in sorted([*folder.glob("w1-*x.json"), *folder.glob("trace-*x.json")]):
        values = json.loads(path.read_text())
        load = w1_load() if path.name.startswith("w1") else trace_load(trace)
        predicted = predict_load(values, load, hardware, fitted.factors)
        off = {name: predicted[name] / values["best"][name] - 1 for name in SERVED}
        lines.append((path.stem, tuple(f"{off[name]:+.1%}" for name in SERVED)))
        loads.append({"load": path.stem, "measured": values["best"], "predicted": predicted, "errors": off})
    columns = ("end to end", "output tokens/s", "mean latency", "mean first token")
    tables.append(TextTable("Loads: predicted over measured, less 1", "load", columns, tuple(lines)))
    numbers = {
        "hardware": hardware.to_json(),
        "factors": asdict(fitted.factors),
        "shapes": found,
        "held_out": {"mean": statistics.fmean(held), "most": max(held)},
        "loads": loads,
    }
    return Result("How near predictions come", tables, numbers=numbers)


def study(options: Options) -> Result:
    """Measure or report."""
    if options.action == "report":
        return report(options.folder, options.trace)
    for part in PARTS if options.part is None else (options.part,):
        measure(part, options.folder, options.trace)
    return Result(f"Measured into {options.folder}")


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
