"""Arguments of a benchmark script that choose its work, and what evicts."""

import argparse
from collections.abc import Iterable
from typing import Any

from winnow.errors import ConfigError
from winnow_lab.bench.lists import names
from winnow_lab.bench.presets import PRESETS


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


def options_by_eviction(
    evictions: Iterable[str], compression: float, options: dict[str, Any], kv_seqs: int, num_kvs: int
) -> dict[str, dict[str, Any]]:
    """Options of `LLM` for each preset, by a name that tells the compression.

    Args:
        compression: of those that evict.
        options: what they have in common, the model at least.
        kv_seqs, num_kvs: the KV memory holds `kv_seqs` sequences of `num_kvs` KVs a row, none evicted.

    Raises:
        ConfigError: a value is out of range, or there is no such preset.
    """
    # Late: a script that measures imports takes its arguments first.
    from winnow.config import EngineConfig
    from winnow.eviction import find_preset
    from winnow_lab.bench.kv_memory import kv_memory_for

    config = EngineConfig.from_options(options | {"compression": compression})
    options = options | {"kv_memory": kv_memory_for(config, kv_seqs, num_kvs)}
    found = {}
    for eviction in evictions:
        find_preset(eviction)  # an unknown name is refused before anything is measured
        if eviction == "full":
            found[eviction] = options
        else:
            found[f"{eviction} {compression:g}x"] = options | {
                "eviction": eviction,
                "compression": compression,
            }
    return found
