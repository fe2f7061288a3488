"""What both benches write: the report as JSON, and the console that tables go to."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from winnow.cli.paths import require_writable

WIDTH = 100
"""Columns where the output is no terminal."""


def console() -> Console:
    """Standard output, wide enough for the tables."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, WIDTH))


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
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def typed_command() -> list[str]:
    """The command line of this process, the program's name without its directory."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
