"""What compression does for throughput where KV memory is short."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow.cli.flags.engine import engine_options, open_llm, silence_transformers
from winnow.cli.flags.options import add_flags, given
from winnow.cli.flags.paths import write_json
from winnow.cli.screen.meter import Meter
from winnow.cli.screen.progress import add_progress_flag, open_progress, show_steps
from winnow.config import CacheConfig, EngineConfig, EvictionConfig, ModelConfig, SchedulerConfig
from winnow.errors import UsageError
from winnow.process.threads import set_threads
from winnow.values.units import format_bytes
from winnow_lab.bench.answering import OnStep
from winnow_lab.bench.kv_memory import kv_memory_for
from winnow_lab.bench.presets import model_cache
from winnow_lab.papers.harness import check_outputs, head_of, show_results, write_page
from winnow_lab.papers.judged import DEMO, TimedPrompt
from winnow_lab.papers.kv_compress.protocol import (
    RANDOM,
    Cell,
    Grid,
    Study,
    cell_prompts,
    measure,
    random_prompts,
    task_prompts,
)
from winnow_lab.papers.kv_compress.results import NOTES, TITLE, all_tables, draw_all, read_rows

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
  python -m winnow_lab.papers kv-compress
  python -m winnow_lab.papers kv-compress --contexts 3584 --compressions 1,2,4,8,16,32,64 --requests 48
  python -m winnow_lab.papers kv-compress --whole leverage --p-and-d leverage-pd --contexts 3584 --compressions 1,16,64
  python -m winnow_lab.papers kv-compress --repeat 3 --json kvc.json --resume --out results
  python -m winnow_lab.papers kv-compress --contexts 500,1000,2000,3500 --mixed --new-tokens 500
  python -m winnow_lab.papers kv-compress --random-model --contexts 6000 --compressions 1,64
  python -m winnow_lab.papers kv-compress --model DIR --task ruler --categories niah_single_1,niah_multikey_1

The demo model answers its own tasks; other models those of --task, so that every timed answer has a score, or
random tokens.
A large gain needs a full cache that holds few sequences (--kv-seqs), and enough requests to fill
the memory when they are compressed. --kv-floor bounds how far short prompts are compressed.
"""
_DTYPE = "bfloat16"
_PAGE = "kv_compress.md"
_OWN = ("eviction", "compression", "kv_budget", "num_accumulators", "kv_memory", "engine")
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
        help="resume from the runs that the file of --json holds, if there is one",
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


def execute(namespace: argparse.Namespace) -> int:
    """Measure, show, and return the exit code."""
    grid = Grid(**given(namespace, Grid))
    options = _engine_options(namespace, grid)
    json_path, out = namespace.json, namespace.out
    check_outputs(
        options,
        {"--json": json_path, "the draft of --json": _draft(json_path) if json_path else None},
        {"--out": out and out / _PAGE},
        figures=True,
    )
    silence_transformers()
    set_threads(options.get("threads"))
    given_none = not namespace.random_model and options.get("model") is None
    has_tasks = given_none or grid.task is not None
    if namespace.random_model:
        with Console(stderr=True).status("making the model"):
            options["model"] = str(RANDOM.save(model_cache()))
    config = EngineConfig.from_options(options)
    options["kv_memory"] = kv_memory_for(config, grid.kv_seqs, grid.longest_sequence)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    study = Study(grid, shown)
    if namespace.resume and json_path.exists():
        study.resume(_read_report(json_path))
    if study.missing:
        study.heads.append(head_of(options))
        _measure(study, options, has_tasks, namespace)
    rows = read_rows(study)
    tables, facts = all_tables(grid, rows), [_facts(grid, options, has_tasks)]
    show_results(study.heads, facts, tables, dense=True)
    if out is not None:
        write_page(out / _PAGE, TITLE, study.heads, facts, NOTES, tables, draw_all(grid, rows, out))
    return 0


def _engine_options(namespace: argparse.Namespace, grid: Grid) -> dict[str, Any]:
    """What was typed, with the bench's own values where nothing was.

    Raises:
        ConfigError: a value is out of range.
        UsageError: flags that contradict each other, a model that is no directory.
    """
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
        raise UsageError("--resume continues the file of --json, which was not given")
    return options


def _read_report(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        report = None
    if not isinstance(report, dict) or "runs" not in report:
        raise UsageError(f"--json {path} holds no report of this bench to resume from")
    return report


def _draft(path: Path) -> Path:
    """Where a report is written before it takes its place: a run that resumes never finds half of it."""
    return path.with_name(f"{path.name}.new")


def _measure(study: Study, options: dict[str, Any], has_tasks: bool, namespace: argparse.Namespace) -> None:
    """Measure what the study misses; every run reaches the file of --json as it ends."""
    grid, json_path, done = study.grid, namespace.json, 0
    total = grid.requests * len(study.missing)
    with (
        open_llm(options) as full,
        open_llm(options | {"eviction": grid.p_and_d}) as evicting,
        open_progress(namespace.progress, sys.stderr) as progress,
    ):
        # The two engines count their tokens apart.
        meters = {True: Meter(), False: Meter()}

        def on_step(cell: Cell) -> OnStep:
            return show_steps(progress, meters[bool(cell.options)], total, done)

        def on_run() -> None:
            nonlocal done
            done += grid.requests
            if json_path is not None:
                write_json(
                    _draft(json_path), study.to_json() | {"rows": [row.to_json() for row in read_rows(study)]}
                )
                _draft(json_path).replace(json_path)

        def prompts(context: int) -> list[TimedPrompt]:
            if has_tasks:
                return task_prompts(full, grid, context)
            return random_prompts(full.vocab_size, context, grid.requests, grid.prompt_seed)

        of_cells = {each: cell_prompts(grid, each, prompts) for each in grid.cell_contexts}
        measure(study, full, evicting, of_cells, on_step, on_run)


def _facts(grid: Grid, options: dict[str, Any], has_tasks: bool) -> str:
    tokens = f"task {grid.task or DEMO}" if has_tasks else "random tokens"
    floor = options.get("kv_floor", EvictionConfig.kv_floor)
    return (
        f"{grid.requests} requests a cell, {tokens}, {options['dtype']}. "
        f"KV memory: {format_bytes(options['kv_memory'])}, as {grid.kv_seqs} x {grid.longest_sequence} tokens take "
        f"with the full cache. Compression leaves at least {floor} KVs a row on average. "
        f"Whole prompt: {grid.whole}. P&D: {grid.p_and_d}."
    )
