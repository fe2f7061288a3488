"""Arguments of a benchmark script that choose its work, and what evicts."""

import argparse

from winnow.bench.lists import names
from winnow.bench.presets import PRESETS
from winnow.errors import ConfigError


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--work`, the numbers that may stand in place of its own, and `--kv-seqs`."""
    parser.add_argument("--work", choices=PRESETS, default="w1", help="model and work (default: %(default)s)")
    for name in ("requests", "prompt_tokens", "new_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the work's own")
    parser.add_argument("--kv-seqs", type=int, help="KV memory for so many whole sequences")


def add_eviction_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--eviction` and `--compression`."""
    parser.add_argument(
        "--eviction",
        type=names,
        default=("full", "batch-max", "kv-compress-pd"),
        help="presets of eviction, commas between (default: full,batch-max,kv-compress-pd)",
    )
    parser.add_argument(
        "--compression", type=float, default=4.0, help="of those that evict (default: %(default)g)"
    )


def take_work(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Set `workload`, and `kv_seqs` where none was typed. Ends the program where a number is out of range."""
    preset = PRESETS[arguments.work]
    arguments.kv_seqs = preset.kv_seqs if arguments.kv_seqs is None else arguments.kv_seqs
    try:
        arguments.workload = preset.workload_with(
            requests=arguments.requests,
            prompt_tokens=arguments.prompt_tokens,
            new_tokens=arguments.new_tokens,
        )
    except ConfigError as error:
        parser.error(str(error))
