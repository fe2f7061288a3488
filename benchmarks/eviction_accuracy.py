"""Accuracy of the demo model under every eviction preset, by category of task and by compression.

    python benchmarks/eviction_accuracy.py --samples 5 [--tokens 2048] [--presets a,b] [--compressions 2,4] [--out DIR]

Each preset runs query-aware (it judges the whole prompt, the question last) and query-agnostic (it judges what stands
before the question: `SamplingParams(context_tokens=n)`). All cells see the same prompts: the demo tasks, hidden in
prose of two books that the demo model was never trained on, taken from the sample prompts that ship in examples/demo.

Writes eviction_accuracy.json (every score), .md (tables) and two plots (.svg) to `--out`. Finished cells are kept in
the JSON as they finish, so an interrupted run goes on where it stopped. Needs matplotlib: pip install -e '.[plots]'
"""

import argparse
import json
import math
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from eviction_plots import write_plots, write_tables
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from winnow import LLM, SamplingParams
from winnow.errors import CapacityError, ContextLengthError, InvalidRequestError
from winnow.evaluate.demo_tasks import CATEGORIES, Haystack, make_sample
from winnow.evaluate.metrics import score
from winnow.eviction import PRESETS, SequenceEviction, settle
from winnow.outputs import CompletionOutput

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "examples" / "demo" / "prompts.jsonl"
MODES = ("aware", "agnostic")
COMPRESSIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
FULL = "full"
# Tokens that may follow beyond the length of the right answer, as in training/evaluate.py.
ANSWER_ROOM = 8
SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[\"'(]?[A-Z])")
# Sequences in the engine at once. Memory holds the whole prompts of all of them and to spare, so that no preset ever
# acts under pressure and no request is preempted.
SEQUENCES = 48
BYTES_PER_TOKEN = 8 * 2**10


@dataclass(frozen=True)
class Task:
    """One prompt with its reference. `context_tokens` of its tokens stand before the question."""

    category: str
    metric: str
    answer: str
    token_ids: tuple[int, ...]
    context_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """Cells that are computed together: one preset, and amounts that may share the computing of the prompt.

    `mode` is None for the full cache, which knows no difference; a compression is None where the preset takes none.
    """

    mode: str | None
    preset: str
    compressions: tuple[float | None, ...]

    def __str__(self) -> str:
        return self.preset if self.mode is None else f"query-{self.mode} {self.preset}"


# -- the prompts ---------------------------------------------------------------------------------------------


def shipped_sentences() -> list[str]:
    """Sentences of the held-out books, in order, each once: from those sample prompts that leave the prose whole."""
    found: dict[str, None] = {}
    for row in map(json.loads, PROMPTS.read_text(encoding="utf-8").splitlines()):
        for line in row["prompt"].split("\n"):
            if row["category"] == "code" and line.startswith("# "):
                found.setdefault(line.removeprefix("# "))
            elif row["category"] == "passage" and line.endswith("]"):
                found |= dict.fromkeys(SENTENCE_END.split(line.rpartition(" [")[0]))
    return list(found)


def make_tasks(tokenizer: Any, samples: int, tokens: int, seed: int) -> list[Task]:
    """`samples` prompts of every category; prompt and answer take about `tokens` tokens."""

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    haystack = Haystack.build(shipped_sentences(), count_tokens)
    tasks = []
    for category in CATEGORIES:
        for number in range(samples):
            rng = random.Random(f"{seed}/{category}/{tokens}/{number}")  # noqa: S311
            sample = make_sample(category, rng, haystack, count_tokens, tokens - ANSWER_ROOM)
            prompt, context = tokenizer.encode(sample.prompt), tokenizer.encode(sample.context)
            room = count_tokens(" " + sample.answer) + ANSWER_ROOM
            # A token that would span context and question counts as question.
            differ = (
                number for number, pair in enumerate(zip(prompt, context, strict=False)) if len({*pair}) > 1
            )
            shared = next(differ, len(context))
            tasks.append(Task(category, sample.metric, sample.answer, tuple(prompt), shared, room))
    return tasks


# -- one cell ------------------------------------------------------------------------------------------------


def parameters(job: Job, task: Task, compressions: Sequence[float | None]) -> SamplingParams:
    amounts = [each for each in compressions if each is not None]
    return SamplingParams(
        n=len(compressions),
        temperature=0.0,
        max_tokens=task.max_tokens,
        eviction=job.preset,
        compression=amounts if amounts and job.preset != FULL else None,
        context_tokens=task.context_tokens if job.mode == "agnostic" else None,
    )


def refusal(llm: LLM, job: Job, tasks: Sequence[Task], compression: float | None) -> dict[str, Any] | None:
    """Why the engine would not run a cell, and for how many of the prompts; None: it runs all."""
    reasons = []
    for task in tasks:
        try:
            llm.abort(llm.submit(task.token_ids, parameters(job, task, [compression])))
        except (CapacityError, ContextLengthError):
            raise  # a fault of this script's settings, not of the preset
        except InvalidRequestError as error:
            reasons.append(str(error))
    return {"refused": reasons[0], "refused_prompts": len(reasons)} if reasons else None


def rounds_in_prompt(eviction: SequenceEviction) -> int:
    """Rounds until the context is computed and cut."""
    computed = last_round = rounds = 0
    kvs = 0.0
    while computed < eviction.context_len:
        ahead = eviction.tokens_to_round(computed, last_round, kvs) or eviction.context_len
        computed, kvs = computed + ahead, kvs + ahead
        if eviction.round_due(computed, last_round, kvs):
            rounds, last_round, kvs = rounds + 1, computed, float(eviction.target)
    return rounds


def reached(
    llm: LLM, task: Task, job: Job, compression: float | None, output: CompletionOutput
) -> float | None:
    """Tokens of the context for each KV that was kept of them; None if the answer ended before they were cut.

    Once a round after the context's end has mixed them with the question's and the answer's, tokens of all for each KV
    at the answer's end.
    """
    report = output.eviction
    if report is None:
        return 1.0
    config = replace(llm.config.eviction, eviction=job.preset, compression=compression)
    context = task.context_tokens if job.mode == "agnostic" else len(task.token_ids)
    total = len(task.token_ids) + task.max_tokens - 1
    eviction = settle(config, len(task.token_ids), total, context, may_idle=False)
    expected = 0 if eviction is None else rounds_in_prompt(eviction)
    if report.rounds < expected:
        return None
    if report.rounds > expected:
        return report.compression
    return context / (report.mean_kept - (report.num_tokens - context))


def run_job(llm: LLM, job: Job, tasks: Sequence[Task], progress: Progress, bar: Any) -> list[dict[str, Any]]:
    """The cells of a job, in the order of its compressions."""
    start = time.perf_counter()
    refusals = {each: refusal(llm, job, tasks, each) for each in job.compressions}
    valid = [each for each in job.compressions if refusals[each] is None]
    outputs: list[list[CompletionOutput]] = []
    together = SEQUENCES // max(len(valid), 1)
    for first in range(0, len(tasks) if valid else 0, together):
        some = tasks[first : first + together]
        params = [parameters(job, task, valid) for task in some]
        answers = llm.generate([task.token_ids for task in some], params)
        if any(each.metrics.num_preemptions for each in answers):
            raise RuntimeError(
                f"{job}: a request was preempted, so its compression is not what was asked for"
            )
        outputs += [each.outputs for each in answers]
        progress.advance(bar, len(some))
    if not valid:
        progress.advance(bar, len(tasks))
    seconds = round((time.perf_counter() - start) / len(job.compressions), 2)
    cells = []
    for compression in job.compressions:
        cell: dict[str, Any] = {
            "mode": job.mode,
            "preset": job.preset,
            "compression": compression,
            "seconds": seconds,
        }
        if compression in valid:
            column = [answers[valid.index(compression)] for answers in outputs]
            scores: dict[str, list[float]] = {}
            ratios: list[float | None] = []
            for task, output in zip(tasks, column, strict=True):
                ratios.append(reached(llm, task, job, compression, output))
                right = score(task.metric, output.text, [task.answer])
                scores.setdefault(task.category, []).append(round(right, 4) if 0 < right < 1 else int(right))
            cell |= {"reached": mean_of(ratios), "scores": scores}
        else:
            cell |= refusals[compression] or {}
        cells.append(cell)
    return cells


def mean_of(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return round(statistics.mean(known), 3) if known else None


# -- all cells -----------------------------------------------------------------------------------------------


def plan(
    presets: Sequence[str], compressions: Sequence[float], modes: Sequence[str], done: set[Any]
) -> Iterator[Job]:
    """What is to be computed: everything but `done`, a set of (mode, preset, compression)."""
    if (FULL in presets or 1.0 in compressions) and (None, FULL, 1.0) not in done:
        yield Job(None, FULL, (1.0,))
    for mode in modes:
        for name in presets:
            policy = PRESETS[name].policy
            wanted: list[float | None] = [each for each in compressions if each > 1.0]
            if policy.budget.fixed is not None:
                wanted = [None]
            left = [each for each in wanted if name != FULL and (mode, name, each) not in done]
            # Samples of one prompt may keep different amounts, but not where rounds fall within the prompt.
            if policy.when.in_prefill:
                yield from (Job(mode, name, (each,)) for each in left)
            elif left:
                yield Job(mode, name, tuple(left))


def key(cell: dict[str, Any]) -> tuple[str | None, str, float | None]:
    return cell["mode"], cell["preset"], cell["compression"]


def environment(llm: LLM, arguments: Sequence[str]) -> dict[str, Any]:
    """Where and how the numbers came about."""
    device = "CPU"
    if torch.cuda.is_available() and llm.config.model.device != "cpu":
        device = torch.cuda.get_device_name()
    return {
        "command": shlex.join(["python", "benchmarks/eviction_accuracy.py", *arguments]),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """The commit that is checked out, with a note where what is measured differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(  # noqa: S603
            ["git", *words],  # noqa: S607
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", "examples")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Results:
    """The finished cells, on disk after each job.

    Raises:
        SystemExit: the file holds cells of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool) -> None:
        self.path = path
        self._run = 0
        self.data: dict[str, Any] = {"settings": settings, "runs": [], "cells": []}
        if resume and path.exists():
            self.data = json.loads(path.read_text(encoding="utf-8"))
            if self.data["settings"] != settings:
                sys.exit(
                    f"{path} holds cells of other settings ({self.data['settings']}): "
                    "choose another --out, or --no-resume to replace it"
                )

    @property
    def done(self) -> set[Any]:
        return {key(cell) for cell in self.data["cells"]}

    def start_run(self, run: dict[str, Any]) -> None:
        """Cells from here on are of this run."""
        if run not in self.data["runs"]:
            self.data["runs"].append(run)
        self._run = self.data["runs"].index(run)

    def add(self, cells: list[dict[str, Any]]) -> None:
        """Keep cells of the present run; the file is replaced as a whole, so that it is never half written."""
        self.data["cells"] += [cell | {"run": self._run} for cell in cells]
        rows = [f'"{name}": {json.dumps(self.data[name])}' for name in ("settings", "runs")]
        cells_text = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in self.data["cells"])
        new = self.path.with_suffix(".json.new")
        new.write_text(
            "{\n" + ",\n".join([*rows, f'"cells": [\n{cells_text}\n]']) + "\n}\n", encoding="utf-8"
        )
        os.replace(new, self.path)


def measure(llm: LLM, jobs: Sequence[Job], tasks: Sequence[Task], results: Results) -> bool:
    """Run all jobs, or as many as the user waits for. Returns whether all are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, speed_estimate_period=1800) as progress:
        bar = progress.add_task("prompts", total=len(jobs) * len(tasks))
        try:
            for job in jobs:
                progress.update(bar, description=str(job))
                cells = run_job(llm, job, tasks, progress, bar)
                results.add(cells)
                progress.console.print(f"{job}: {', '.join(map(brief, cells))}", highlight=False)
        except KeyboardInterrupt:
            return False
    return True


def brief(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    if "refused" in cell:
        return f"{cell['compression']:g}x refused"
    mean = statistics.mean(each for scores in cell["scores"].values() for each in scores)
    ratio = cell["compression"] or cell["reached"]
    return f"{mean:.2f}" if ratio is None else f"{ratio:.4g}x {mean:.2f}"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    def one_of(names: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            unknown = [name for name in chosen if name not in names]
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(names)}")
            return [name for name in names if name in chosen]

        return parse

    def ratios(text: str) -> list[float]:
        try:
            found = sorted({float(each) for each in text.split(",")})
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers with commas between, got {text!r}") from None
        if not all(1.0 <= each < math.inf for each in found):
            raise argparse.ArgumentTypeError(f"expected finite numbers of at least 1, got {text!r}")
        return found

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=positive, default=5, help="prompts of each category (default: 5)")
    parser.add_argument("--tokens", type=positive, default=2048, help="of prompt and answer (default: 2048)")
    parser.add_argument(
        "--presets",
        type=one_of(list(PRESETS)),
        default=list(PRESETS),
        help="names with commas (default: all)",
    )
    parser.add_argument(
        "--compressions", type=ratios, default=list(COMPRESSIONS), help="default: 1,2,4,8,16,32,64"
    )
    parser.add_argument("--modes", type=one_of(MODES), default=list(MODES), help="default: aware,agnostic")
    parser.add_argument("--seed", type=int, default=77, help="of the prompts (default: 77)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="default: docs/results")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the finished cells that OUT/eviction_accuracy.json holds (default: yes)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Command line; see --help. Returns the exit status."""
    chosen = parse_arguments(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    settings = {"samples": chosen.samples, "tokens": chosen.tokens, "seed": chosen.seed}
    results = Results(chosen.out / "eviction_accuracy.json", settings, chosen.resume)
    jobs = list(plan(chosen.presets, chosen.compressions, chosen.modes, results.done))
    finished = True
    if jobs:
        with LLM(
            dtype="float32",
            kv_floor=1,
            num_scores=2,
            max_num_seqs=SEQUENCES,
            kv_memory=SEQUENCES * (chosen.tokens + 64) * BYTES_PER_TOKEN,
        ) as llm:
            tasks = make_tasks(llm.tokenizer, chosen.samples, chosen.tokens, chosen.seed)
            results.start_run(environment(llm, arguments))
            finished = measure(llm, jobs, tasks, results)
    if results.data["cells"]:
        write_tables(results.data, chosen.out / "eviction_accuracy.md")
        write_plots(results.data, chosen.out)
    cells = len(results.data["cells"])
    print(f"{cells} cells in {chosen.out}" + ("" if finished else "; stopped: the same command goes on"))
    return 0 if finished else 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
