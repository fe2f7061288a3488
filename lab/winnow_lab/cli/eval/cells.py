"""The flags that say which presets keeping how much a command of `winnow eval` compares, and on what data."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from winnow.errors import UsageError
from winnow_lab.cli.eval import typed

if TYPE_CHECKING:
    from winnow.values.eviction_request import Amount

OF_CELLS = ("eviction", "compression", "kv_budget", "seed")
"""Flags of the engine that cells take the place of, or that have a meaning of their own in an evaluation."""
KV_FLOOR = 1
"""Compressions are reached only where nothing else holds more than they say."""


def add_cell_flags(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Return presets and amounts; the group, for more flags."""
    cells = parser.add_argument_group("cells")
    cells.add_argument(
        "--eviction",
        dest="presets",
        metavar="A,B,...",
        type=typed.names,
        default=(),
        help="presets to compare (winnow policies lists them); left out: the full cache alone",
    )
    add_amount_flags(cells, (4.0,))
    return cells


def add_amount_flags(parser: "argparse._ActionsContainer", default: tuple[float, ...]) -> None:
    """Add the flags of what cells keep; `default` are the compressions where neither is given."""
    parser.add_argument(
        "--kv-budget",
        dest="kv_budgets",
        metavar="C,...",
        type=typed.lengths,
        default=(),
        help="KVs kept per row on average, in place of compressions or beside them",
    )
    add_compression_flag(parser, default)
    parser.set_defaults(compressions=None, default_compressions=default)


def cell_amounts(namespace: argparse.Namespace) -> "tuple[Amount, ...]":
    """Return what the flags of `add_amount_flags` say."""
    from winnow_lab.evaluate.cell import amounts_of

    budgets, compressions = namespace.kv_budgets, namespace.compressions
    if compressions is None:
        compressions = () if budgets else namespace.default_compressions
    return amounts_of(compressions, budgets)


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
