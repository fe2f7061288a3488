"""What a larger batch brings when the prompt is evicted while it is read."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from winnow.cli.flags.engine import model_path, silence_transformers
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import write_json
from winnow.cli.screen.progress import add_progress_flag
from winnow.errors import UsageError
from winnow.report.fingerprint import model_digest
from winnow.values.units import format_bytes
from winnow_lab.papers.batch_max.methods import BatchMaxConfig
from winnow_lab.papers.batch_max.protocol import BatchMaxBench, OnStage
from winnow_lab.papers.batch_max.results import BatchMaxReport, TaskResult, all_tables
from winnow_lab.papers.harness import check_outputs, head_of, show_results, write_page
from winnow_lab.study.journal import ResultJournal

DESCRIPTION = """\
Batch-Max (Metel et al. 2024), section 4.1, on the demo model and its tasks, or on another of each.

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
  python -m winnow_lab.papers batch-max
  python -m winnow_lab.papers batch-max --kv-memory 16MiB --tasks single,passkey --json batch_max.json
  python -m winnow_lab.papers batch-max --samples 960 --tasks few-shot --rules average
  python -m winnow_lab.papers batch-max --model DIR --task gsm8k --shots 16 --samples 24
  python -m winnow_lab.papers batch-max --model DIR --task summaries --shots 12 --kv-memory 200MiB
docs/benchmarks.md says what the tables mean.
"""


_NOT_OF_ACCURACY = ("model", "tasks", "repeats", "requests", "threads")
"""Settings that accuracy does not depend on."""


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
        help="keep what each task came to; the same command resumes there",
    )
    parser.add_argument("--overwrite", action="store_true", help="start the journal afresh")
    add_progress_flag(parser, plain="a line per stage")
    add_flags(parser, BatchMaxConfig, "the experiment")


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    config = BatchMaxConfig(**given(namespace, BatchMaxConfig))
    check_outputs({}, {f"--{name}": getattr(namespace, name) for name in ("json", "markdown", "journal")})
    silence_transformers()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    head = head_of({})
    with _stages(namespace.progress) as show:
        report = _measure(namespace, config, head["commit"], show)
    facts, tables = _facts(report), all_tables(report)
    show_results([head], facts, tables)
    write_json(namespace.json, head | report.to_json())
    if namespace.markdown is not None:
        write_page(namespace.markdown, "Batch-Max's experiment", [head], facts, "", tables)
    return 0


def _measure(
    namespace: argparse.Namespace, config: BatchMaxConfig, commit: str | None, show: OnStage
) -> BatchMaxReport:
    """All of it, but for the tasks that the journal knows."""
    if namespace.journal is None:
        if namespace.overwrite:
            raise UsageError("--overwrite starts the file of --journal afresh, which was not given")
        return BatchMaxBench(config, show).run()
    settings = {name: value for name, value in vars(config).items() if name not in _NOT_OF_ACCURACY}
    settings["data"] = config.data and str(config.data)
    fingerprint = {
        "model": model_digest(model_path({"model": config.model})),
        "bench": "batch-max",
        "commit": commit,
        **settings,
    }
    with ResultJournal(
        namespace.journal, fingerprint, TaskResult.from_json, overwrite=namespace.overwrite
    ) as journal:
        known = {result.name: result for result in journal.found}
        return BatchMaxBench(config, show, known, lambda result: journal.append([result])).run()


@contextmanager
def _stages(mode: str) -> Iterator[Callable[[str], None]]:
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


def _facts(report: BatchMaxReport) -> list[str]:
    config = report.config
    longest = max(task.longest_prompt for task in report.tasks)
    spent = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.seconds.items())
    return [
        f"{format_bytes(report.kv_bytes_budget)} of KV memory, {config.dtype}; prompts of up to {longest:,} tokens, "
        f"{config.new_tokens} new tokens in what is timed; {config.samples} prompts of each task, one in "
        f"{960 / config.samples:g} of the paper's 960; seed {config.seed}; medians of {config.repeats}",
        f"ED runs out of memory at b = {report.out_of_memory}. The experiment took: {spent}.",
    ]
