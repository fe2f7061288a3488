"""What benches write: the report as JSON, and tables on the console."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow.cli.engine import model_files
from winnow.cli.paths import require_distinct, require_writable, write_text
from winnow.json_values import dump_json
from winnow.text_table import TextTable

WIDTH = 100
"""Columns where the output is no terminal."""


def console() -> Console:
    """Standard output, wide enough for the tables; text stands there as it is, also where it reads like markup."""
    plain = Console(markup=False, emoji=False)
    return plain if plain.is_terminal else Console(markup=False, emoji=False, width=max(plain.width, WIDTH))


def print_tables(out: Console, tables: Iterable[TextTable], *, dense: bool = False) -> None:
    """Each table between its title and its notes; `dense` as for `TextTable.rich`."""
    for table in tables:
        # A title of rich's own would be broken to the table's width.
        out.print(f"\n{table.title}", highlight=False, markup=False, soft_wrap=True)
        out.print(table.rich(dense=dense))
        for note in table.notes:
            out.print(note, highlight=False, markup=False, soft_wrap=True)


def check_written(written: Mapping[str, Path | None], options: Mapping[str, Any]) -> None:
    """Refuse files that would be written over by one another, or over the model's.

    Args:
        written: what the user calls each path that will be written, and the path; None: it was not given.
        options: the engine's, as typed.

    Raises:
        UsageError: names both paths.
    """
    named = [(name, path) for name, path in written.items() if path is not None]
    require_distinct(named, model_files(options))


def check_json_path(path: Path | None) -> None:
    """Refuse a path that would be found unusable only after the work.

    Raises:
        UsageError: names the path.
    """
    if path is not None:
        require_writable(path, f"--json {path}")


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write the report, if a path was asked for."""
    if path is not None:
        write_text(path, dump_json(report, indent=2) + "\n", f"--json {path}")


def typed_command() -> list[str]:
    """The command line as a user types it: the program without its directory, a package as `python -m` names it."""
    program, arguments = Path(sys.argv[0]), sys.argv[1:]
    if program.name != "__main__.py":
        return [program.name, *arguments]
    names, folder = [program.parent.name], program.parent.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    # `python -m winnow` is what `winnow` runs.
    return ["winnow", *arguments] if names == ["winnow"] else ["python", "-m", ".".join(names), *arguments]
