"""Winnow beside other engines: the same model, the same work, the same threads, in turn.

    python benchmarks/peers/run.py
    python benchmarks/peers/run.py --peers winnow,openvino --rounds 5 --json peers.json
    python benchmarks/peers/run.py --requests 4 --prompt-tokens 64 --new-tokens 8 --kv-seqs 2

Every peer gets a virtual environment of its own below --folder and the model in the format it wants; both stay there
for the next start. Then come the rounds: each runs every configuration once, in a fresh process, with loading and a
tiny first request outside the time. What cannot be installed or fails is shown with its error.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Load, Peer
from protocol import Work
from report import show
from rich.console import Console
from runner import Outcome, Runner
from tokenizer import save_with_tokenizer

from winnow.bench.environment import CONVERT_SECONDS, Environment, PeerError, alone, call
from winnow.bench.presets import PRESETS
from winnow.bench.work_arguments import add_work_arguments, take_work
from winnow.bench.workload import Workload
from winnow.report.provenance import Machine, report_head

FOLDER = Path("runs") / "peers"


def main(argv: Sequence[str] | None = None) -> int:
    """Install, convert, run in turn, show. Returns 0 if Winnow itself ran, else 1."""
    arguments = parse(argv)
    console = Console(stderr=True, highlight=False)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    preset, workload = PRESETS[arguments.work], arguments.workload
    console.print("making the model")
    model = save_with_tokenizer(preset.shape, folder / "models")
    work = Work(
        str(model), workload.prompts(preset.shape.vocab_size), workload.new_tokens, arguments.threads, {}
    )
    float32_kvs = torch.backends.cpu.get_cpu_capability() != "AVX512"
    load = Load(workload.requests, workload.sequence_tokens, arguments.kv_seqs, float32_kvs)

    outcomes: list[Outcome] = []
    places: dict[str, tuple[Path, Path]] = {}
    for name in arguments.peers:
        peer = PEERS[name]
        error = None
        try:
            console.print(f"{name}: environment and model")
            places[name] = prepare(peer, folder, model, arguments.lock)
        except PeerError as unusable:
            error = str(unusable)
            console.print(f"{name}: {error.splitlines()[-1]}", markup=False, soft_wrap=True)
        outcomes += [Outcome(peer, configuration, error=error) for configuration in peer.configurations(load)]

    runner = Runner(folder, arguments.timeout, arguments.lock)
    for round_number, outcome in in_turn(outcomes, arguments.rounds):
        python, converted = places[outcome.peer.name]
        configured = replace(work, model=str(converted), options=outcome.configuration.options)
        runner.run(python, outcome, configured)
        result = (
            f"{outcome.rates[-1]:.1f} tokens/s" if outcome.error is None else outcome.error.splitlines()[-1]
        )
        row = f"{outcome.peer.name}, {outcome.configuration.name}"
        console.print(f"round {round_number}, {row}: {result}", markup=False, soft_wrap=True)

    machine = replace(Machine.here(), threads=arguments.threads)
    head = report_head([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)], machine)
    show(outcomes, workload, machine, head)
    if arguments.json is not None:
        write(arguments.json, head, workload, arguments.kv_seqs, outcomes)
    return 0 if any(outcome.median for outcome in outcomes if outcome.peer.name == "winnow") else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked; `workload` holds the preset's with what was typed in its place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="commas between them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    add_work_arguments(parser)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of everyone (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds of one run (default: %(default)g)"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="environments, models (default: %(default)s)"
    )
    parser.add_argument("--lock", type=Path, help="hold a lock on this file while converting or measuring")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args(argv)
    arguments.peers = arguments.peers.split(",")
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"--peers must name some of {', '.join(PEERS)}, got {name!r}")
    take_work(parser, arguments)
    for name in ("rounds", "threads", "timeout", "kv_seqs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def prepare(peer: Peer, folder: Path, model: Path, lock: Path | None) -> tuple[Path, Path]:
    """The interpreter that runs the peer's script, and the model in the peer's format.

    Raises:
        PeerError: the peer cannot be installed, or does not take the model.
    """
    if not peer.packages:
        return Path(sys.executable), model
    environment = Environment(folder / "environments" / peer.name)
    environment.prepare(peer.packages, peer.unwanted)
    if peer.convert is None:
        return environment.python, model
    converted = folder / "models" / f"{model.name}-{peer.name}"
    if not converted.is_dir():
        unfinished = converted.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        tool, *words = peer.convert(model, unfinished)
        with alone(lock):
            call([environment.python.parent / tool, *words], f"{tool} for {peer.name}", CONVERT_SECONDS)
        unfinished.rename(converted)
    return environment.python, converted


def in_turn(outcomes: list[Outcome], rounds: int) -> Iterator[tuple[int, Outcome]]:
    """Every configuration once a round; one that failed has no further rounds."""
    for round_number in range(1, rounds + 1):
        for outcome in outcomes:
            if outcome.error is None:
                yield round_number, outcome


def write(
    path: Path, head: dict[str, Any], workload: Workload, kv_seqs: int, outcomes: list[Outcome]
) -> None:
    """The report as JSON."""
    report = head | {
        "workload": asdict(workload),
        "kv_seqs": kv_seqs,
        "configurations": [outcome.to_json() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
