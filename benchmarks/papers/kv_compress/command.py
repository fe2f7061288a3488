"""`python -m benchmarks.papers kv-compress`: what compression does for throughput where KV memory is short."""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from benchmarks.papers.kv_compress.grid import Cell, Grid
from winnow.cli.engine import engine_options, model_path, open_llm, silence_transformers
from winnow.cli.errors import UsageError
from winnow.cli.meter import Meter
from winnow.cli.options import add_flags, given
from winnow.cli.paths import require_writable
from winnow.cli.progress import add_progress_flag, open_progress
from winnow.cli.report import (
    check_json_path,
    check_written,
    console,
    print_tables,
    typed_command,
    write_json,
)
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from winnow.figures import can_draw
from winnow.outputs import EngineStats
from winnow.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.papers.kv_compress.row import Row
    from benchmarks.papers.kv_compress.study import Prompts, Study
    from winnow.llm import LLM
    from winnow.text_table import TextTable

DESCRIPTION = """\
Answer the same prompts in the same KV memory with the full cache and at each compression, and tell
how many times faster that is, how large the decoding batch became, and what it costs in accuracy.

Two policies stand side by side (--whole, --p-and-d). kv-compress shrinks a sequence after its prompt, which has to fit
whole, and before a preemption. kv-compress-pd also shrinks it within the prompt and while it
decodes, so that the batch grows nearly with the compression.

Beside every gain stands its bound: the gain if decoding took no time. It is measured in the same
run, from the same prompts with one new token each. Rounds within the prompt can pass it, since they
shorten attention in the prompt too.
"""
EPILOG = """\
examples:
  python -m benchmarks.papers kv-compress
  python -m benchmarks.papers kv-compress --contexts 3584 --compressions 1,2,4,8,16,32,64 --requests 48
  python -m benchmarks.papers kv-compress --whole winnow --p-and-d winnow-pd --contexts 3584 --compressions 1,16,64
  python -m benchmarks.papers kv-compress --repeat 3 --json kvc.json --resume --out results
  python -m benchmarks.papers kv-compress --random-model --contexts 6000 --compressions 1,64
  python -m benchmarks.papers kv-compress --model DIR --contexts 8192 --new-tokens 512 --kv-seqs 4

The demo model answers its own tasks, so that accuracy is told; other models answer random tokens.
A large gain needs a full cache that holds few sequences (--kv-seqs), and enough requests to fill
the memory when they are compressed. --kv-floor bounds how far short prompts are compressed.
"""
_DTYPE = "bfloat16"
_PAGE = "kv_compress.md"
_OWN = ("eviction", "compression", "kv_budget", "num_scores", "kv_memory", "engine")
"""Engine options that the bench chooses itself."""
_SHOWN = {"contexts": "1024,2048,3584", "compressions": "1,4,16,64"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.usage = f"{parser.prog} [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--random-model",
        action="store_true",
        help="the demo model's shape with random weights and 65536 positions, made once",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every run as JSON, as soon as it is done"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the runs that the file of --json holds, if there is one",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write kv_compress.md and the figures there (needs matplotlib)",
    )
    add_progress_flag(parser)
    add_flags(parser, Grid, "the work", defaults=_SHOWN)
    shown = {"dtype": _DTYPE, "max_model_len": "the longest prompt with its answer"}
    add_flags(parser, ModelConfig, "model", skip=_OWN, defaults=shown)
    add_flags(parser, CacheConfig, "cache", skip=_OWN)
    add_flags(parser, SchedulerConfig, "scheduler", defaults={"max_num_seqs": "as many as requests"})
    add_flags(parser, EvictionConfig, "eviction", skip=_OWN)


@dataclass(frozen=True)
class _Plan:
    """What was typed, with the bench's own values where nothing was."""

    grid: Grid
    options: dict[str, Any]
    random_model: bool
    json: Path | None
    resume: bool
    out: Path | None

    @classmethod
    def of(cls, namespace: argparse.Namespace) -> "_Plan":
        """Check everything that can be checked before a model is made or loaded.

        Raises:
            ConfigError: a value is out of range.
            UsageError: flags that contradict each other, a path that cannot be written, a model that is no directory.
        """
        grid = Grid(**given(namespace, Grid))
        options = {"dtype": _DTYPE} | engine_options(namespace)
        options.setdefault("max_num_seqs", grid.requests)
        # Tables are as long as the longest sequence may be, and their bytes are KV memory too.
        options.setdefault("max_model_len", grid.longest_sequence)
        most = options.get("max_num_batched_tokens", SchedulerConfig.max_num_batched_tokens)
        options["max_num_batched_tokens"] = max(most, options["max_num_seqs"])
        EngineConfig.from_options(options)
        if namespace.random_model and options.get("model") is not None:
            raise UsageError("--random-model and --model both name a model, give one")
        if namespace.resume and namespace.json is None:
            raise UsageError("--resume goes on from the file of --json, which was not given")
        check_written(
            {
                "--json": namespace.json,
                "the draft of --json": None if namespace.json is None else _draft(namespace.json),
                "the page of --out": None if namespace.out is None else namespace.out / _PAGE,
                "--out": namespace.out,
            },
            options,
        )
        check_json_path(namespace.json)
        if namespace.out is not None:
            if not can_draw():
                raise UsageError("--out draws figures with matplotlib: pip install 'winnow-llm[plots]'")
            require_writable(namespace.out / _PAGE, f"--out {namespace.out}")
        return cls(grid, options, namespace.random_model, namespace.json, namespace.resume, namespace.out)

    @property
    def has_tasks(self) -> bool:
        """Whether the model can do the demo tasks."""
        return not self.random_model and self.options.get("model") is None


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    plan = _Plan.of(namespace)
    from benchmarks.papers.kv_compress.row import read_rows
    from benchmarks.papers.kv_compress.study import Study
    from benchmarks.papers.kv_compress.tables import all_tables
    from winnow.bench.machine import Machine, report_head
    from winnow.bench.room import kv_memory_for
    from winnow.threads import set_threads

    silence_transformers()
    set_threads(plan.options.get("threads"))
    options = dict(plan.options)
    if plan.random_model:
        from benchmarks.papers.kv_compress.model import RANDOM
        from winnow.bench.presets import model_cache

        with Console(stderr=True).status("making the model"):
            options["model"] = str(RANDOM.save(model_cache()))
    config = EngineConfig.from_options(options)
    options["kv_memory"] = kv_memory_for(config, plan.grid.kv_seqs, plan.grid.longest_sequence)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    study = Study(plan.grid, shown)
    if plan.resume and plan.json is not None and plan.json.exists():
        study.resume(_read_report(plan.json))
    head = report_head(typed_command(), Machine.here(options.get("device", "auto")))

    if study.missing:
        study.heads.append(head)
        _measure(plan, options, study, namespace.progress)
    rows = read_rows(study)
    tables = all_tables(plan.grid, rows)
    facts = _facts(plan, options["kv_memory"])
    out = console()
    for each in study.heads:
        where = Machine(**each["machine"])
        out.print(f"{where}; commit {each['commit']}; {each['date']}", highlight=False, soft_wrap=True)
    out.print(" ".join(facts), highlight=False)
    print_tables(out, tables, dense=True)
    if plan.out is not None:
        _write_page(plan.out, study, facts, tables, rows)
    return 0


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or "runs" not in report:
        raise UsageError(f"--json {path} holds no report of this bench to go on from")
    return report


def _draft(path: Path) -> Path:
    """Where a report is written before it takes its place."""
    return path.with_name(f"{path.name}.new")


def _save(path: Path | None, study: "Study") -> None:
    """Write the report in one move: who goes on from it never finds half of it."""
    if path is not None:
        from benchmarks.papers.kv_compress.row import read_rows

        draft = _draft(path)
        write_json(draft, study.to_json() | {"rows": [row.to_json() for row in read_rows(study)]})
        draft.replace(path)


def _measure(plan: _Plan, options: dict[str, Any], study: "Study", mode: str) -> None:
    from benchmarks.papers.kv_compress.study import measure

    with (
        open_llm(options) as full,
        open_llm(options | {"eviction": plan.grid.p_and_d}) as evicting,
        _Display(mode, plan.grid.requests, len(study.missing)) as display,
    ):

        def on_run() -> None:
            display.end_cell()
            _save(plan.json, study)

        measure(study, full, evicting, _prompts(plan, options, full), display.show, on_run)


def _prompts(plan: _Plan, options: dict[str, Any], llm: "LLM") -> "Prompts":
    from benchmarks.papers.kv_compress.prompts import random_prompts, task_prompts
    from winnow.bench.vocabulary import vocab_size

    grid = plan.grid
    if plan.has_tasks:
        return {each: task_prompts(llm, each, grid.requests, grid.prompt_seed) for each in grid.contexts}
    known = vocab_size(model_path(options))
    return {each: random_prompts(known, each, grid.requests, grid.prompt_seed) for each in grid.contexts}


@dataclass
class _Display:
    """Progress over all cells; the two engines count their tokens apart."""

    mode: str
    requests: int
    cells: int
    done: int = 0
    meters: dict[bool, Meter] = field(default_factory=lambda: {True: Meter(), False: Meter()})

    def __enter__(self) -> Self:
        self._progress = open_progress(self.mode, sys.stderr)
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def show(self, cell: Cell, done: int, stats: EngineStats) -> None:
        """Show how things stand, if it is time."""
        if self._progress.due():
            meter = self.meters[bool(cell.options)]
            self._progress.show(meter.snapshot(self.done + done, self.requests * self.cells, 0, stats))

    def end_cell(self) -> None:
        self.done += self.requests


def _facts(plan: _Plan, kv_memory: int) -> list[str]:
    grid = plan.grid
    tokens = "tasks of the demo model" if plan.has_tasks else "random tokens"
    floor = plan.options.get("kv_floor", EvictionConfig.kv_floor)
    return [
        f"{grid.requests} requests a cell, {tokens}, {plan.options['dtype']}.",
        f"KV memory: {format_bytes(kv_memory)}, as {grid.kv_seqs} x {grid.longest_sequence} tokens take with the full "
        "cache.",
        f"Compression leaves at least {floor} KVs a row on average.",
        f"Whole prompt: {grid.whole}. P&D: {grid.p_and_d}.",
    ]


def _write_page(
    out: Path, study: "Study", facts: list[str], tables: list["TextTable"], rows: list["Row"]
) -> None:
    from benchmarks.papers.kv_compress.charts import draw_all
    from benchmarks.papers.kv_compress.document import NOTES, TITLE
    from winnow.bench.page import page

    figures = [path for path in draw_all(study.grid, rows, out) if path.suffix == ".png"]
    text = page(TITLE, study.heads, [" ".join(facts)], NOTES, tables, figures)
    (out / _PAGE).write_text(text, encoding="utf-8")
