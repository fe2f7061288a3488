"""`python -m benchmarks.papers batch-max`: what a larger batch brings when the prompt is evicted while it is read."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.papers.batch_max.config import BatchMaxConfig
from winnow.cli.engine import demo_model, silence_transformers
from winnow.cli.options import add_flags, given
from winnow.cli.paths import require_writable
from winnow.cli.progress import add_progress_flag
from winnow.cli.report import (
    check_json_path,
    check_written,
    console,
    print_tables,
    typed_command,
    write_json,
)
from winnow.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.papers.batch_max.report import BatchMaxReport

DESCRIPTION = """\
Batch-Max (Metel et al. 2024), section 4.1, on the demo model and its tasks.

Batches are static. ED, the fastest decoding-only eviction, keeps one KV of each row once prompts
are read; while they are read, memory must hold all of them whole. b0 is the smallest batch for
which it does not, and ED runs with the largest below it. BM evicts while it reads (Algorithm 1,
p = 64). Its batch grows, and with it shrinks |kv|, the KVs that each prompt may keep, as long as
accuracy stays near that of the full cache (FKV). Timed answers have a fixed length; those that are
judged end as answers do. "latest KVs" is the same loop keeping the latest KVs: a task on which that
is as good tells nothing about a rule, and does not count in the mean.
"""
EPILOG = """\
examples:
  python -m benchmarks.papers batch-max
  python -m benchmarks.papers batch-max --kv-memory 16MiB --tasks single,passkey --json batch_max.json
  python -m benchmarks.papers batch-max --samples 960 --tasks few-shot --rules average
docs/benchmarks.md says what the tables mean.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured as JSON too")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the tables as a page too")
    parser.add_argument(
        "--journal",
        metavar="FILE",
        type=Path,
        help="keep what each task came to; the same command goes on from there",
    )
    add_progress_flag(parser, plain="a line per stage")
    add_flags(parser, BatchMaxConfig, "the experiment")


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    config = BatchMaxConfig(**given(namespace, BatchMaxConfig))
    check_written({f"--{name}": getattr(namespace, name) for name in ("json", "markdown", "journal")}, {})
    check_json_path(namespace.json)
    for name in ("markdown", "journal"):
        path = getattr(namespace, name)
        if path is not None:
            require_writable(path, f"--{name} {path}")
    import torch

    from benchmarks.papers.batch_max.finished import FinishedTasks
    from benchmarks.papers.batch_max.protocol import BatchMaxBench
    from benchmarks.papers.batch_max.tables import all_tables
    from winnow.bench.machine import Machine, report_head

    silence_transformers()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    head = report_head(typed_command(), machine := Machine.here())
    finished = None
    if namespace.journal is not None:
        finished = FinishedTasks(namespace.journal, config, demo_model(), head["commit"])
    with _stages(namespace.progress) as show:
        report = BatchMaxBench(config, show, finished).run()
    facts = [f"{machine}; commit {head['commit']}; {head['date']}", *_facts(report)]
    tables = all_tables(report)
    out = console()
    for line in facts:
        out.print(line, highlight=False, soft_wrap=True)
    print_tables(out, tables)
    write_json(namespace.json, head | report.to_json())
    if namespace.markdown is not None:
        page = ["# Batch-Max's experiment", _code(head["command"]), "\n\n".join(facts)]
        page += ["\n".join(table.markdown()).rstrip() for table in tables]
        namespace.markdown.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return 0


@contextmanager
def _stages(mode: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done: live, or a line for each new stage."""
    if mode == "auto":
        mode = "rich" if sys.stderr.isatty() else "plain"
    if mode == "rich":
        with Console(stderr=True).status("starting") as status:
            yield status.update
        return
    shown: list[str] = []

    def plain(stage: str) -> None:
        name = stage.rpartition(",")[0] or stage  # without the count
        if mode == "plain" and name not in shown:
            shown.append(name)
            print("winnow:", name, file=sys.stderr, flush=True)

    yield plain


def _facts(report: "BatchMaxReport") -> list[str]:
    config = report.config
    longest = max(task.longest_prompt for task in report.tasks)
    spent = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
    return [
        f"{format_bytes(report.kv_bytes_budget)} of KV memory, {config.dtype}; prompts of up to {longest:,} tokens, "
        f"{config.new_tokens} new tokens in what is timed; {config.samples} prompts of each task, one in "
        f"{960 / config.samples:g} of the paper's 960; seed {config.seed}; medians of {config.repeats}",
        f"ED runs out of memory at b = {report.out_of_memory}. The experiment took: {spent}.",
    ]


def _code(command: list[str]) -> str:
    return "    " + " ".join(command)
