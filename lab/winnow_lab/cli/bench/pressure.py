"""`winnow bench pressure`: a recorded load on too little memory."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import (
    add_engine_flags,
    check_written,
    engine_options,
    open_llm,
    silence_transformers,
)
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import check_json_path, require_writable, write_json
from winnow.cli.screen.progress import Meter, add_progress_flag, open_progress, show_steps
from winnow.errors import UsageError
from winnow.extras import install_hint
from winnow.report.provenance import typed_command
from winnow.values.units import format_bytes
from winnow_lab.bench.pressure_config import PressureConfig
from winnow_lab.report.console import console

if TYPE_CHECKING:
    from winnow_lab.bench.preemption import Point
    from winnow_lab.bench.pressure import PlayedTrace

SUMMARY = "a recorded load on too little memory, under one setting after the other"
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
  winnow bench pressure TRACE --watermarks 0.7,0.9,0.98 --json sweep.json --plot sweep
  winnow bench pressure TRACE --sweep preemption --lengths 256,1024,4096
Settings are played one after the other: compare within one run, on a machine that does nothing else.
"""
_REPEAT = 3
"""Preemptions of each length and way."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow bench pressure TRACE [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a recorded load: .csv or .jsonl")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured as JSON too")
    parser.add_argument("--plot", metavar="STEM", type=Path, help="draw STEM.svg")
    add_progress_flag(parser)
    add_flags(parser, PressureConfig, "the load")
    add_engine_flags(parser)


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    config = PressureConfig(**given(namespace, PressureConfig))
    options = engine_options(namespace)
    _check_files(namespace, options)
    settings = config.settings(options)
    for each in settings.values():
        for name in each:
            if name in options:
                raise UsageError(
                    f"--{name.replace('_', '-')} is what --sweep {config.sweep} changes: leave it out"
                )
    from winnow.report.provenance import Machine, report_head
    from winnow_lab.bench.preemption import break_even, preemption_panel, preemption_table
    from winnow_lab.bench.pressure import pressure_panels, pressure_table
    from winnow_lab.report.plots import line_chart, save_figure

    silence_transformers()
    played, notes = _measure(namespace, config, options, settings)
    points = _preempt(config, options) if config.sweep == "preemption" else []
    head = report_head(typed_command(), machine := Machine.here(options.get("device", "auto")))
    out = console()
    out.print(f"{machine}; commit {head['commit']}", highlight=False, soft_wrap=True)
    table = pressure_table(played, f"{namespace.trace.name} by {config.sweep}", config.sweep, notes)
    panels = pressure_panels(played)
    for each_table in (table, preemption_table(points)) if points else (table,):
        out.print(each_table.title, highlight=False, soft_wrap=True)
        out.print(each_table.upright().rich())
        for note in each_table.notes:
            out.print(note, highlight=False, soft_wrap=True)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    report: dict[str, Any] = {"trace": namespace.trace.name, "notes": notes}
    report["replays"] = [each.to_json() for each in played]
    if points:
        panels.append(preemption_panel(points))
        report |= {"preemptions": [asdict(point) for point in points], "break_even": break_even(points)}
    write_json(namespace.json, head | {"engine": shown, "load": vars(config)} | report)
    if namespace.plot is not None:
        save_figure(line_chart(panels, table.title, columns=len(panels)), namespace.plot)
    return 0


def _check_files(namespace: argparse.Namespace, options: dict[str, Any]) -> None:
    if not namespace.trace.is_file():
        raise UsageError(f"TRACE must be a file, got {str(namespace.trace)!r}")
    check_written({"--json": namespace.json}, options)
    check_json_path(namespace.json)
    if namespace.plot is not None:
        from winnow_lab.report.plots import can_draw

        if not can_draw():
            raise UsageError(f"--plot needs matplotlib: {install_hint('plots', './lab')}")
        require_writable(namespace.plot.with_name(f"{namespace.plot.name}.svg"), f"--plot {namespace.plot}")


def _measure(
    namespace: argparse.Namespace,
    config: PressureConfig,
    options: dict[str, Any],
    settings: dict[str, dict[str, Any]],
) -> tuple[list["PlayedTrace"], tuple[str, ...]]:
    """Play the load under each of `settings`. Returns what came of them, and what the table's notes say."""
    from winnow_lab.bench.pressure import play

    played, load, budget = [], [], 0
    with open_progress(namespace.progress, sys.stderr) as progress:
        for name, changed in settings.items():
            with open_llm(options | changed) as llm:
                load = config.load(namespace.trace, llm.max_model_len)
                if not load:
                    raise UsageError(
                        f"no request of {namespace.trace} has at most {llm.max_model_len} tokens (max_model_len) at "
                        f"--token-scale {config.token_scale:g}"
                    )
                show = show_steps(progress, Meter(), len(load))
                played.append(play(llm, name, load, llm.vocab_size, config.prompt_seed, show))
                budget = llm.stats().kv_bytes_budget
    tokens = sum(each.prompt_tokens for each in load), sum(each.output_tokens for each in load)
    return played, (
        f"{len(load)} requests, over {load[-1].arrival:.1f} s: the first {config.requests} of the trace, less those "
        f"longer than the model's context; lengths x {config.token_scale:g}, arrivals {config.rate:g} times as dense.",
        f"{tokens[0]:,} prompt and {tokens[1]:,} output tokens; KV memory {format_bytes(budget)}.",
    )


def _preempt(config: PressureConfig, options: dict[str, Any]) -> list["Point"]:
    from winnow_lab.bench.preemption import ANSWER, measure_preemption

    with open_llm(options) as llm:
        lengths = [length for length in config.lengths if length + ANSWER <= llm.max_model_len]
        if not lengths:
            return []
        room = 2 * llm.kv_bytes(max(lengths) + ANSWER)
        tables = llm.stats().kv_bytes_budget  # what was asked for holds tables and one request at least
    changed = {
        "kv_memory": room + tables,
        "kv_offloading_size": room + tables,
        "enable_prefix_caching": False,
    }
    with open_llm(options | changed) as llm:
        return measure_preemption(llm, lengths, _REPEAT)
