"""The command line of the comparison."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from peers import PEERS

from winnow.bench.presets import PRESETS
from winnow.errors import ConfigError

FOLDER = Path("runs") / "peers"
W2_REQUESTS, W2_SEQS = 64, 8
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
        "--kv-seqs", type=int, help="KV memory for so many whole sequences, the longest (default: the work's)"
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
    add("--steps", type=int, help="stop after so many runs; needs --journal")
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
    preset = PRESETS["w1"]
    arguments.kv_seqs = preset.kv_seqs if arguments.kv_seqs is None else arguments.kv_seqs
    try:
        arguments.workload = preset.workload_with(
            requests=arguments.requests,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
        )
    except ConfigError as error:
        parser.error(str(error))
