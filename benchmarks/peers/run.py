"""Winnow beside other engines: the same model, the same work, the same threads, in turn.

    python benchmarks/peers/run.py
    python benchmarks/peers/run.py --peers winnow,openvino --rounds 5 --json peers.json
    python benchmarks/peers/run.py --work w2 --model SmolLM2-135M-Instruct.Q4_1.gguf --journal runs/w2.jsonl
    python benchmarks/peers/run.py --requests 4 --prompt-tokens 64 --new-tokens 8 --kv-seqs 2

w1: random prompts on a model of random weights. w2: questions with right answers on SmolLM2, whose share is shown
beside the speed.

Every peer gets a virtual environment of its own below --folder and the model in the format it wants; both stay there
for the next start. Then come the rounds: each runs every configuration once, in a fresh process, with loading and a
tiny first request outside the time. What cannot be installed or fails is shown with its error.

With --journal a comparison may be made in pieces: what the journal has is not run again, and --steps says after how
many runs to stop. The exit code is then 3 while runs are missing.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from arguments import command_line, parse
from configurations import Load
from journal import Entry, Journal
from peers import PEERS
from preparing import Places
from protocol import Work
from report import show
from rich.console import Console
from runner import Outcome, Runner
from works import GivenWork, make_w1, make_w2

from winnow.bench.environment import PeerError
from winnow.errors import WinnowError
from winnow.report.provenance import Machine, report_head

UNFINISHED = 3
# Of w2: policies that judge by the question, which stands last, and what OpenVINO holds of 4k tokens.
W2_POLICIES, W2_EVICTION_TOKENS = ("snapkv", "winnow"), 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Install, convert, run in turn, show. Returns 0 if Winnow itself ran, else 1.

    2: something is unusable. `UNFINISHED`: runs are missing.
    """
    arguments = parse(argv, __doc__)
    console = Console(stderr=True, highlight=False)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console.print("making the model")
    try:
        given = make_work(arguments, folder)
    except WinnowError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    places = Places(folder, given.model, arguments.lock)
    outcomes = plan(arguments, given)
    if arguments.prepare:
        for outcome in outcomes:
            prepare(places, outcome, console)
        return 1 if any(outcome.error and not outcome.skipped for outcome in outcomes) else 0

    try:
        identity = {} if arguments.journal is None else given.identity() | {"threads": arguments.threads}
        journal = Journal(arguments.journal, identity)
    except PeerError as error:
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    steps = Steps(arguments.steps)
    runner = Runner(folder, arguments.timeout, arguments.lock)
    for number, outcome in in_turn(outcomes, arguments.rounds):
        entry = journal.find(outcome.peer, outcome.configuration, number)
        if entry is None and not steps.take():
            outcome.missing += 1
            continue
        if entry is None:
            prepare(places, outcome, console)
            if outcome.error is not None:
                continue
        entry = entry or run_once(runner, places, outcome, number, given, arguments.threads, journal)
        outcome.take(entry)
        tell(console, outcome, number)

    machine = replace(Machine.here(), threads=arguments.threads)
    head = report_head(command_line(sys.argv[1:] if argv is None else argv), machine)
    missing = sum(outcome.missing for outcome in outcomes)
    if missing:
        console.print(f"{missing} runs are missing; start again to go on")
        return UNFINISHED
    show(outcomes, given, machine, head)
    if arguments.json is not None:
        write(arguments.json, head, given, outcomes)
    return 0 if any(outcome.median for outcome in outcomes if outcome.peer.name == "winnow") else 1


class Steps:
    """How many more runs this start may make; None: all."""

    def __init__(self, most: int | None) -> None:
        self._left = most

    def take(self) -> bool:
        """Count one, if there is one left."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0


def make_work(arguments: argparse.Namespace, folder: Path) -> GivenWork:
    """The work that was asked for, with its model below `folder`."""
    models = folder / "models"
    if arguments.work == "w2":
        return make_w2(arguments.model, arguments.requests, arguments.kv_seqs, models)
    return make_w1(arguments.workload, arguments.kv_seqs, models)


def plan(arguments: argparse.Namespace, given: GivenWork) -> list[Outcome]:
    """A row for every configuration, nothing measured yet."""
    float32_kvs = torch.backends.cpu.get_cpu_capability() != "AVX512"
    load = Load(len(given.prompts), given.longest, given.kv_seqs, float32_kvs)
    if given.name == "w2":
        load = replace(load, policies=W2_POLICIES, eviction_tokens=W2_EVICTION_TOKENS)
    rows = [
        Outcome(PEERS[name], row, error=row.lacking, skipped=row.lacking is not None)
        for name in arguments.peers
        for row in PEERS[name].configurations(load)
    ]
    wanted = arguments.only
    return [
        row
        for row in rows
        if not wanted
        or any(fnmatchcase(f"{row.peer.name}: {row.configuration.name}", pattern) for pattern in wanted)
    ]


def prepare(places: Places, outcome: Outcome, console: Console) -> None:
    """Install the row's peer and convert its model, or set the row's error."""
    name = f"{outcome.peer.name}, {outcome.configuration.name}"
    try:
        places.find(outcome.peer, outcome.configuration.weights)
    except PeerError as unusable:
        outcome.error = str(unusable)
        console.print(f"{name}: {outcome.error.splitlines()[-1]}", markup=False, soft_wrap=True)


def in_turn(outcomes: list[Outcome], rounds: int) -> Iterator[tuple[int, Outcome]]:
    """Every configuration once a round; one that failed has no further rounds."""
    for round_number in range(1, rounds + 1):
        for outcome in outcomes:
            if outcome.error is None:
                yield round_number, outcome


def run_once(
    runner: Runner,
    places: Places,
    outcome: Outcome,
    number: int,
    given: GivenWork,
    threads: int,
    journal: Journal,
) -> Entry:
    """One run of one row, kept in the journal whatever came of it."""
    python, model = places.find(outcome.peer, outcome.configuration.weights)
    work = Work(str(model), given.prompts, given.new_tokens, threads, outcome.configuration.options)
    try:
        result, error = asdict(runner.run(python, outcome, work)), None
    except PeerError as failed:
        result, error = None, str(failed)
    return journal.add(outcome.peer, outcome.configuration, number, result, error)


def tell(console: Console, outcome: Outcome, number: int) -> None:
    """One line for one run."""
    result = f"{outcome.rates[-1]:.1f} tokens/s" if outcome.error is None else outcome.error.splitlines()[-1]
    row = f"{outcome.peer.name}, {outcome.configuration.name}"
    console.print(f"round {number}, {row}: {result}", markup=False, soft_wrap=True)


def write(path: Path, head: dict[str, Any], given: GivenWork, outcomes: list[Outcome]) -> None:
    """The report as JSON."""
    report = head | {
        "work": given.name,
        "summary": given.summary,
        "workload": {
            "requests": len(given.prompts),
            "prompt_tokens": sum(map(len, given.prompts)),
            "longest": given.longest,
            "new_tokens": given.new_tokens,
        },
        "kv_seqs": given.kv_seqs,
        "configurations": [outcome.to_json(given.exam) for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    # By an exception, so that what was started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
