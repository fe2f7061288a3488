"""`winnow bench throughput`: fixed work through the whole engine."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from winnow.cli.flags.engine import (
    add_engine_flags,
    add_foreign_flags,
    check_foreign,
    check_written,
    engine_options,
    open_llm,
    silence_transformers,
)
from winnow.cli.flags.options import add_flags, add_model_argument, given
from winnow.cli.flags.paths import check_json_path, write_json
from winnow.cli.screen.progress import Meter, add_progress_flag, open_progress, show_steps
from winnow.config import EngineConfig
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow.values.checks import check_integer
from winnow.values.units import format_bytes
from winnow.vllm import names as vllm_names
from winnow_lab.bench.presets import PRESETS, model_cache
from winnow_lab.bench.workload import Workload
from winnow_lab.report.console import console

if TYPE_CHECKING:
    from winnow_lab.bench.throughput import Pass, ThroughputReport

SUMMARY = "fixed work through the whole engine, in tokens per second"
DESCRIPTION = """\
Answer requests of random tokens, greedily, all submitted at once, and tell how long it took.

Loading the model and a first tiny request are not timed. The work is done several times by the
same engine; medians count, least and most stand beside them.
"""
EPILOG = """\
examples:
  winnow bench throughput
  winnow bench throughput --preset w1
  winnow bench throughput --preset w1 --eviction kv-compress-pd --compression 4 --json w1.json
  winnow bench throughput --model DIR --requests 64 --prompt-tokens 2048 --kv-seqs 8
--preset w1 is a Llama of 107 million random parameters: 32 requests of 1024 + 128 tokens in
bfloat16, with KV memory for 8 whole sequences. Whatever else is typed takes precedence.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = "winnow bench throughput [MODEL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--preset", choices=PRESETS, help="work with a name: its model, requests and KV memory"
    )
    parser.add_argument(
        "--kv-seqs",
        metavar="K",
        type=int,
        help="in place of --kv-memory: as many bytes as K sequences take that keep every KV",
    )
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="times (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured as JSON too")
    add_progress_flag(parser)
    add_model_argument(parser)
    add_flags(parser, Workload, "the work")
    add_engine_flags(parser)
    add_foreign_flags(parser, vllm_names.BENCH)


@dataclass(frozen=True)
class _Plan:
    """Values as typed, with a preset's where nothing was."""

    workload: Workload
    options: dict[str, Any]
    kv_seqs: int | None
    repeat: int

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> "_Plan":
        """Check everything that can be checked before a model is made or loaded.

        Raises:
            ConfigError: a value is out of range.
            UsageError: flags that contradict each other, a model that is no directory.
        """
        check_foreign(namespace, vllm_names.BENCH)
        options, work = engine_options(namespace), given(namespace, Workload)
        for name in ("repeat", "kv_seqs"):
            value = getattr(namespace, name)
            if value is not None:
                check_integer(f"--{name.replace('_', '-')}", value, 1, error=UsageError)
        if namespace.kv_seqs is not None and "kv_memory" in options:
            raise UsageError("--kv-seqs and --kv-memory mean the same, give one")
        check_written({"--json": namespace.json}, options)
        check_json_path(namespace.json)
        if namespace.preset is None:
            return cls(Workload(**work), options, namespace.kv_seqs, namespace.repeat)
        preset = PRESETS[namespace.preset]
        kv_seqs = namespace.kv_seqs
        if kv_seqs is None and "kv_memory" not in options:
            kv_seqs = preset.kv_seqs
        workload = Workload(**vars(preset.workload) | work)
        return cls(workload, {"dtype": preset.dtype} | options, kv_seqs, namespace.repeat)


def execute(namespace: argparse.Namespace) -> int:
    """Work, show, and return the exit code."""
    plan = _Plan.of(namespace)
    from winnow.report.provenance import Machine, report_head
    from winnow_lab.bench.kv_memory import kv_memory_for

    silence_transformers()
    options = {"enable_prefix_caching": False} | plan.options  # passes repeat their prompts
    if namespace.preset is not None and "model" not in options:
        with Console(stderr=True).status("making the model"):
            options["model"] = str(PRESETS[namespace.preset].shape.save(model_cache()))
    if plan.kv_seqs is not None:
        config = EngineConfig.from_options(options)
        options["kv_memory"] = kv_memory_for(config, plan.kv_seqs, plan.workload.sequence_tokens)
    report = _measure(plan, options, namespace.progress)
    head = report_head(typed_command(), machine := Machine.here(options.get("device", "auto")))
    out = console()
    out.print(f"{machine}; commit {head['commit']}", highlight=False, soft_wrap=True)
    out.print(_table(report))
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    write_json(namespace.json, head | {"engine": shown, "kv_seqs": plan.kv_seqs} | report.to_json())
    return 0


def _measure(plan: _Plan, options: dict[str, Any], mode: str) -> "ThroughputReport":
    from winnow_lab.bench.throughput import measure_throughput

    with open_llm(options) as llm, open_progress(mode, sys.stderr) as progress:
        show = show_steps(progress, Meter(), plan.workload.requests)
        return measure_throughput(llm, plan.workload, llm.vocab_size, plan.repeat, show)


def _table(report: "ThroughputReport") -> Table:
    work, last = report.workload, report.passes[-1]
    table = Table(
        title=f"{work.requests} requests of {work.prompt_tokens} + {work.new_tokens} tokens",
        title_justify="left",
    )
    table.add_column("")
    table.add_column(f"median of {len(report.passes)}", justify="right")
    table.add_column("least", justify="right")
    table.add_column("most", justify="right")
    rows: list[tuple[str, Any, str]] = [
        ("output tokens/s", lambda each: each.output_rate, ",.1f"),
        ("total tokens/s", lambda each: each.total_rate, ",.0f"),
        ("wall time, s", lambda each: each.seconds, ".2f"),
        ("time to first token, s", lambda each: each.first_token_seconds, ".2f"),
    ]
    for name, read, form in rows + _part_rows(last):
        low, high = report.spread(read)
        table.add_row(name, *(format(value, form) for value in (report.median(read), low, high)))
    table.add_section()
    for name, value in _facts(report, last):
        table.add_row(name, value)
    return table


def _part_rows(last: "Pass") -> list[tuple[str, Any, str]]:
    return [(f"  {part}, s", lambda each, part=part: each.parts[part], ".2f") for part in last.parts]


def _facts(report: "ThroughputReport", last: "Pass") -> list[tuple[str, str]]:
    """Return what is the same in every pass, or grows over them: of the last."""
    return [
        ("running at once, mean", f"{last.mean_running:.1f}"),
        ("running at once, most", f"{last.most_running}"),
        ("steps", f"{last.steps:,}"),
        ("preemptions", f"{last.preemptions:,}"),
        ("eviction rounds", f"{last.eviction_rounds:,}"),
        ("KV memory given", format_bytes(report.kv_bytes_budget)),
        ("KV memory used, peak", format_bytes(last.kv_bytes_peak)),
        ("memory of the process, peak", format_bytes(report.peak_resident_bytes)),
    ]
