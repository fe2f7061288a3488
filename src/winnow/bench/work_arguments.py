"""Arguments of a benchmark script that choose a preset's work, or change it."""

import argparse

from winnow.bench.presets import PRESETS
from winnow.errors import ConfigError


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--work`, the numbers that may stand in place of its own, and `--kv-seqs`."""
    parser.add_argument("--work", choices=PRESETS, default="w1", help="model and work (default: %(default)s)")
    for name in ("requests", "prompt_tokens", "new_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the work's own")
    parser.add_argument("--kv-seqs", type=int, help="KV memory for so many whole sequences")


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
