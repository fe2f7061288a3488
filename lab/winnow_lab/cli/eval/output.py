"""Output of all commands of `winnow eval`: flags, tables on the terminal, and their head."""

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.cli.flags.engine import model_files
from winnow.cli.flags.paths import require_distinct, require_writable
from winnow.cli.screen.progress import add_progress_flag
from winnow.errors import UsageError
from winnow.report.provenance import typed_command
from winnow_lab.report.console import console, print_tables

if TYPE_CHECKING:
    from winnow.llm import LLM
    from winnow_lab.report.tables import TextTable

RESULTS = ("results.json", "results.md")
"""File that every evaluation writes."""


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of where results go and how progress is shown."""
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write tables, plots, every score and the journal"
    )
    out.add_argument("--overwrite", action="store_true", help="start afresh in DIR")
    add_progress_flag(out)


def check_output(namespace: argparse.Namespace, options: dict[str, Any], journal: str) -> None:
    """Refuse an output directory that would be found unusable only after the work, or holds what is read.

    Args:
        options: the engine's, as typed.
        journal: name of the file that keeps finished answers.

    Raises:
        UsageError: it is a file, or cannot be written to, or is --data or --model; --overwrite without it.
    """
    output: Path | None = namespace.output
    if output is None:
        if namespace.overwrite:
            raise UsageError("--overwrite needs -o DIR: there is nothing to replace")
        return
    if output.exists() and not output.is_dir():
        raise UsageError(f"-o must be a directory, got the file {str(output)!r}")
    data: Path | None = getattr(namespace, "data", None)
    written = [("-o", output), *((f"{name} of -o", output / name) for name in (*RESULTS, journal))]
    require_distinct(written, [*([("--data", data)] if data is not None else []), *model_files(options)])
    require_writable(output / RESULTS[0], f"-o {output}")


def run_head(llm: "LLM", options: dict[str, Any]) -> dict[str, Any]:
    """Return what every output begins with: the command, when, where, the model and the engine's options."""
    from winnow.report.provenance import Machine, report_head

    model = llm.config.model.model
    return report_head(typed_command(), Machine.here(options.get("device", "auto"))) | {
        "model": "the demo model" if model is None else str(model),
        "engine": llm.config.settings(),
    }


def show_tables(head: dict[str, Any], amount: str, tables: Iterable["TextTable"]) -> None:
    """Print tables, below a line that says how, where, when and how much was measured."""
    from winnow.report.provenance import device_name

    out = console()
    out.print(shlex.join(head["command"]), highlight=False, markup=False, soft_wrap=True)
    where = device_name(head["machine"])
    out.print(f"{where}; commit {head['commit']}; {head['date']}; {amount}", highlight=False, soft_wrap=True)
    print_tables(out, tables)
