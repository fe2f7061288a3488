"""`winnow bench pressure`: a recorded load on too little memory."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import open_llm
from winnow.cli.screen.progress import MODES, Meter, open_progress, show_steps
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.values.checks import check_number
from winnow.values.units import format_bytes
from winnow_lab.bench.traces import read_trace, scaled
from winnow_lab.study import EngineOptions, Result, flag

if TYPE_CHECKING:
    from winnow_lab.bench.preemption import Point
    from winnow_lab.bench.pressure import PlayedTrace

SUMMARY = "a recorded load on too little memory, under one setting after the other"
ARGUMENTS = "TRACE "
DESCRIPTION = """\
Play a trace (Azure's .csv, Mooncake's .jsonl) on an engine whose --kv-memory is too small for it, once
for each setting of --sweep, and tell batch, throughput, preemptions and latencies side by side.

Requests come at the trace's times, --rate times as dense, with --token-scale times its lengths; their
tokens are random, and begin alike where the trace says that they did. Answers have the trace's length.
"""
EPILOG = """\
examples:
  winnow bench pressure AzureLLMInferenceTrace_conv.csv --kv-memory 4MiB
  winnow bench pressure conversation_trace.jsonl --token-scale 0.02 --rate 4 --sweep prefix-cache
  winnow bench pressure TRACE --watermarks 0.7,0.9,0.98 --json sweep.json
  winnow bench pressure TRACE --sweep preemption --lengths 256,1024,4096
Settings are played one after the other: compare within one run, on a machine that does nothing else.
"""
_REPEAT = 3
"""Preemptions of each length and way."""


@dataclass(frozen=True)
class Options(EngineOptions):
    trace: Path = flag(text="a recorded load: .csv or .jsonl", positional=True)
    sweep: str = flag(
        "watermark",
        "what changes from one run to the next: the high watermark; preempted requests computed again or swapped "
        "to the host, with the break-even by length; the prefix cache; or what a request holds from its start",
        choices=("watermark", "preemption", "prefix-cache", "reservation"),
    )
    watermarks: tuple[float, ...] = flag((0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0), "high ones", least=0.01)
    lengths: tuple[int, ...] = flag((128, 512, 1024, 2048), "tokens of requests that are preempted", least=1)
    requests: int = flag(64, "of the trace, from its start", least=1)
    token_scale: float = flag(0.125, "lengths of prompts and answers, as a part of the trace's", least=1e-6)
    rate: float = flag(1.0, "how many times as dense as the trace's the arrivals are", least=1e-6)
    prompt_seed: int = flag(0, "of the prompts' tokens", least=0)
    progress: str = flag("auto", "auto: live on a terminal, else a line every 5 s", choices=MODES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for watermark in self.watermarks:
            check_number("watermarks", watermark, 0.01, 1.0)
        if not self.trace.is_file():
            raise UsageError(f"TRACE must be a file, got {str(self.trace)!r}")
        changed = {name for setting in self.settings.values() for name in setting}
        for name in sorted(changed & self.engine.keys()):
            flagged = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flagged} is what --sweep {self.sweep} changes: leave it out")

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """The engine's options that each run changes, by the name of its line."""
        if self.sweep == "watermark":
            return {f"{watermark:.0%}": {"watermark_high": watermark} for watermark in self.watermarks}
        if self.sweep == "preemption":
            memory = EngineConfig.from_options(self.engine).cache.kv_memory
            return {"recompute": {"kv_offloading_size": None}, "swap": {"kv_offloading_size": memory}}
        if self.sweep == "prefix-cache":
            return {f"prefix cache {name}": {"enable_prefix_caching": name == "on"} for name in ("off", "on")}
        kinds = ("max", "prompt", "on-demand")
        found = {name: {"kv_reservation": name, "enable_prefix_caching": False} for name in kinds}
        return found | {
            "on-demand + prefix cache": {"kv_reservation": "on-demand", "enable_prefix_caching": True}
        }


def measure(options: Options) -> Result:
    from winnow_lab.bench.preemption import break_even, preemption_table
    from winnow_lab.bench.pressure import pressure_table

    played, notes = _play(options)
    title = f"{options.trace.name} by {options.sweep}"
    tables = [pressure_table(played, title, options.sweep, notes)]
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.engine.items()}
    names = ("sweep", "watermarks", "lengths", "requests", "token_scale", "rate", "prompt_seed")
    numbers: dict[str, Any] = {
        "engine": shown,
        "load": {name: getattr(options, name) for name in names},
        "trace": options.trace.name,
        "notes": notes,
        "replays": [each.to_json() for each in played],
    }
    points = _preempt(options) if options.sweep == "preemption" else []
    if points:
        tables.append(preemption_table(points))
        numbers |= {"preemptions": [asdict(point) for point in points], "break_even": break_even(points)}
    return Result(title, tables, numbers=numbers, lists=("replays",))


def _play(options: Options) -> "tuple[list[PlayedTrace], tuple[str, ...]]":
    from winnow_lab.bench.pressure import play

    played, load, budget = [], [], 0
    scale, rate = options.token_scale, options.rate
    trace = read_trace(options.trace, options.requests)
    with open_progress(options.progress, sys.stderr) as progress:
        for name, changed in options.settings.items():
            with open_llm({**options.engine, **changed}) as llm:
                load = scaled(trace, tokens=scale, rate=rate, longest=llm.max_model_len)
                if not load:
                    raise UsageError(
                        f"no request of {options.trace} has at most {llm.max_model_len} tokens (max_model_len) at "
                        f"--token-scale {scale:g}"
                    )
                show = show_steps(progress, Meter(), len(load))
                played.append(play(llm, name, load, llm.vocab_size, options.prompt_seed, show))
                budget = llm.stats().kv_bytes_budget
    prompts, outputs = sum(each.prompt_tokens for each in load), sum(each.output_tokens for each in load)
    return played, (
        f"{len(load)} requests, over {load[-1].arrival:.1f} s: the first {options.requests} of the trace, less those "
        f"longer than the model's context; lengths x {scale:g}, arrivals {rate:g} times as dense.",
        f"{prompts:,} prompt and {outputs:,} output tokens; KV memory {format_bytes(budget)}.",
    )


def _preempt(options: Options) -> "list[Point]":
    from winnow_lab.bench.preemption import ANSWER, measure_preemption

    with open_llm(dict(options.engine)) as llm:
        lengths = [length for length in options.lengths if length + ANSWER <= llm.max_model_len]
        if not lengths:
            return []
        # What was asked for holds tables and one request at least.
        room = 2 * llm.kv_bytes(max(lengths) + ANSWER) + llm.stats().kv_bytes_budget
    changed = {"kv_memory": room, "kv_offloading_size": room, "enable_prefix_caching": False}
    with open_llm({**options.engine, **changed}) as llm:
        return measure_preemption(llm, lengths, _REPEAT)
