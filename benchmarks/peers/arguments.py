"""The command line of the comparison."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from peers import PEERS

from winnow.bench.work_arguments import take_work

FOLDER = Path("runs") / "peers"
W2_REQUESTS, W2_SEQS = 64, 8
_OF_THE_MACHINE = ("--folder", "--journal", "--json", "--lock")
_COUNTS = ("rounds", "threads", "timeout", "kv_seqs", "steps")


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The arguments, checked; `workload` holds w1's with what was typed in its place."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", choices=("w1", "w2"), default="w1", help="(default: %(default)s)")
    add("--model", type=Path, help="of w2: SmolLM2-135M-Instruct, a GGUF file or a directory")
    add("--requests", type=int, help="in place of the work's own")
    add("--prompt-tokens", type=int, help="of w1, in place of its own")
    add("--new-tokens", type=int, help="of w1, in place of its own")
    add(
        "--kv-seqs",
        type=int,
        help="KV memory for this number of whole sequences, the longest (default: the work's)",
    )
    add("--peers", default=",".join(PEERS), help="commas between them (default: %(default)s)")
    add("--only", action="append", help="rows whose 'PEER: CONFIGURATION' matches; may be repeated")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, help="of everyone (default: %(default)s)")
    add("--timeout", type=float, default=900, help="seconds of one run (default: %(default)g)")
    add("--folder", type=Path, default=FOLDER, help="environments, models (default: %(default)s)")
    add("--lock", type=Path, help="hold a lock on this file while converting or measuring")
    add("--prepare", action="store_true", help="install and convert, measure nothing")
    add("--journal", type=Path, help="keep every run in this file, and run none that it has")
    add("--steps", type=int, help="stop after this number of runs; needs --journal")
    add("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args(argv)
    arguments.peers = arguments.peers.split(",")
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"--peers must name some of {', '.join(PEERS)}, got {name!r}")
    _take_work(parser, arguments)
    for name in _COUNTS:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.steps is not None and arguments.journal is None:
        parser.error("--steps needs --journal, or what was measured would be lost")
    return arguments


def _take_work(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.work == "w2":
        if arguments.model is None or not arguments.model.exists():
            parser.error(f"--work w2 needs --model, a file or directory that exists, got {arguments.model}")
        if arguments.prompt_tokens is not None or arguments.new_tokens is not None:
            parser.error("--prompt-tokens and --new-tokens are w1's; w2 has lengths of its own")
        arguments.requests = W2_REQUESTS if arguments.requests is None else arguments.requests
        arguments.kv_seqs = W2_SEQS if arguments.kv_seqs is None else arguments.kv_seqs
        return
    take_work(parser, arguments)


def command_line(argv: Sequence[str]) -> list[str]:
    """For a report: the command without the files of the machine that it was typed on."""
    places = [place for place, word in enumerate(argv) if word.partition("=")[0] in _OF_THE_MACHINE]
    left_out = {place + 1 for place in places if "=" not in argv[place]} | set(places)
    words = [word for place, word in enumerate(argv) if place not in left_out]
    return [Path(sys.argv[0]).name, *words]
