"""The command line of the comparison."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from winnow.errors import ConfigError
from winnow_lab.bench.presets import PRESETS
from winnow_lab.peers.peers import PEERS

FOLDER = Path("runs") / "peers"
_OF_THE_MACHINE = ("--folder", "--journal", "--json", "--lock", "--out")
_COUNTS = ("rounds", "threads", "timeout", "kv_seqs", "steps", "requests")


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The arguments of W1, checked; `workload` holds the work with what was typed in its place."""
    parser = make_parser(description)
    add = parser.add_argument
    add("--prompt-tokens", type=int, help="in place of the work's own")
    add("--new-tokens", type=int, help="in place of the work's own")
    add(
        "--kv-seqs",
        type=int,
        help="KV memory for this number of whole sequences, the longest (default: the work's)",
    )
    add("--journal", type=Path, help="keep every run in this file, and run none that it has")
    add("--json", type=Path, help="write everything measured to this file")
    arguments = parser.parse_args(argv)
    preset = PRESETS["w1"]
    arguments.kv_seqs = preset.kv_seqs if arguments.kv_seqs is None else arguments.kv_seqs
    numbers = {name: getattr(arguments, name) for name in ("requests", "prompt_tokens", "new_tokens")}
    try:
        arguments.workload = preset.workload_with(**numbers)
    except ConfigError as error:
        parser.error(str(error))
    check(parser, arguments)
    return arguments


def make_parser(description: str | None, timeout: float = 900) -> argparse.ArgumentParser:
    """With the arguments of every comparison."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, help="in place of the work's own")
    add("--peers", default=",".join(PEERS), help="commas between them (default: %(default)s)")
    add("--only", action="append", help="rows whose 'PEER: CONFIGURATION' matches; may be repeated")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    cores = len(os.sched_getaffinity(0))
    add("--threads", type=int, default=cores, help="of everyone (default: %(default)s)")
    add("--timeout", type=float, default=timeout, help="seconds of one run (default: %(default)g)")
    add("--folder", type=Path, default=FOLDER, help="environments, models (default: %(default)s)")
    add("--lock", type=Path, help="hold a lock on this file while converting or measuring")
    add("--prepare", action="store_true", help="install and convert, measure nothing")
    add("--steps", type=int, help="stop after this number of runs; needs --journal")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where a number is out of range or there is no such peer; `peers` becomes a list."""
    arguments.peers = arguments.peers.split(",")
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"--peers must name some of {', '.join(PEERS)}, got {name!r}")
    for name in _COUNTS:
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if arguments.steps is not None and arguments.journal is None:
        parser.error("--steps needs --journal, or what was measured would be lost")


def command_line(argv: Sequence[str]) -> list[str]:
    """For a report: the command without the files of the machine that it was typed on."""
    places = [place for place, word in enumerate(argv) if word.partition("=")[0] in _OF_THE_MACHINE]
    left_out = {place + 1 for place in places if "=" not in argv[place]} | set(places)
    words = [word for place, word in enumerate(argv) if place not in left_out]
    return [Path(sys.argv[0]).name, *words]
