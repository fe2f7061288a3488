"""The flags that say which presets at which compressions a command of `winnow eval` compares, and on what data."""

import argparse
from pathlib import Path

from winnow.cli.eval import typed
from winnow.errors import UsageError

OF_CELLS = ("eviction", "compression", "kv_budget", "seed")
"""Flags of the engine that cells take the place of, or that have a meaning of their own in an evaluation."""
KV_FLOOR = 1
"""Compressions are reached only where nothing else holds more than they say."""


def add_cell_flags(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Return presets and compressions; the group, for more flags."""
    cells = parser.add_argument_group("cells")
    cells.add_argument(
        "--eviction",
        dest="presets",
        metavar="A,B,...",
        type=typed.names,
        default=(),
        help="presets to compare (winnow policies lists them); left out: the full cache alone",
    )
    add_compression_flag(cells, (4.0,))
    return cells


def add_compression_flag(parser: "argparse._ActionsContainer", default: tuple[float, ...]) -> None:
    """Add the flag of the compressions of cells."""
    shown = ",".join(f"{each:g}" for each in default)
    parser.add_argument(
        "--compression",
        dest="compressions",
        metavar="R,...",
        type=typed.compressions,
        default=default,
        help=f"tokens judged per KV kept; 1 is the full cache (default: {shown})",
    )


def add_data_flag(work: "argparse._ArgumentGroup") -> None:
    """Add the flag of the folder of a task's files."""
    work.add_argument(
        "--data", metavar="DIR", type=Path, help="the task's files; left out: the sample that ships"
    )


def check_data(namespace: argparse.Namespace) -> None:
    """Refuse --data that is no directory.

    Raises:
        UsageError: names it.
    """
    if namespace.data is not None and not namespace.data.is_dir():
        raise UsageError(f"--data must be a directory, got {str(namespace.data)!r}")
