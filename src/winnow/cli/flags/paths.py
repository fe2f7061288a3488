"""Paths that a command reads and writes: usable, and each a file of its own, before anything is touched."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from winnow.errors import UsageError
from winnow.values.json_values import dump_json

STANDARD = "-"
"""The path that means standard input or standard output."""


def require_writable(path: Path, name: str) -> None:
    """Raise UsageError for a path, called `name` to the user, that would be found unusable only after the work.

    A link to a file that is not there yet counts as that file: it stays a link, and nothing is left where it leads.
    """
    there = path.exists()
    if there and not path.is_file() and not path.is_dir():
        return  # a device or a pipe: to open it is to use it
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from error
    if not there:
        os.unlink(os.path.realpath(path))


def write_text(path: Path, text: str, name: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {name}: {error.strerror}") from error


def check_json_path(path: Path | None) -> None:
    if path is not None:
        require_writable(path, f"--json {path}")


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        write_text(path, dump_json(report, indent=2) + "\n", f"--json {path}")


def require_distinct(
    written: Sequence[tuple[str, Path]], read: Sequence[tuple[str, Path]] = (), *, prints: bool = True
) -> None:
    """Raise UsageError for a file that would be written over by another one, or over what is read; directories too.

    Links count as the file that they lead to, under whatever names. Paths stand behind what the user calls them; where
    the command `prints`, standard output and standard error count as written, if they are files.
    """
    files = [(name, path, _identities(path, 0), True) for name, path in written]
    files += [(name, path, _identities(path, 0), False) for name, path in read]
    streams = [("standard output", 1), ("standard error", 2)] if prints else []
    for place, (name, path, keys, is_written) in enumerate(files):
        for other, other_path, other_keys, other_written in files[place + 1 :]:
            if keys & other_keys and (is_written or other_written):
                paths = str(path) if path == other_path else f"{path} and {other_path}"
                apart = f"{name} must not be {other}"
                if is_written and other_written:
                    apart = f"{name} and {other} must not be the same file"
                raise UsageError(f"{apart}: both are {paths}")
        for stream, descriptor in streams:
            if keys & _descriptor_identity(descriptor):
                raise UsageError(f"{name} must not be where {stream} goes: both are {path}")


def _identities(path: Path, standard: int) -> set[object]:
    """Return what two paths have in common if they are one file: where they lead, and what lies there."""
    if str(path) == STANDARD:
        return _descriptor_identity(standard)
    resolved = Path(os.path.realpath(path))
    try:
        found = resolved.stat()
    except OSError:
        return {resolved}
    # Writing to a device or a pipe twice destroys nothing.
    is_kept = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return {resolved, (found.st_dev, found.st_ino)} if is_kept else set()


def _descriptor_identity(descriptor: int) -> set[object]:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return set()
    return {(found.st_dev, found.st_ino)} if stat.S_ISREG(found.st_mode) else set()
