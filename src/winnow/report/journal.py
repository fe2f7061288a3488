"""Journals: append-only files from which a killed process resumes.

The first line is a JSON header with the format's name and the fingerprint of the run (winnow.report.fingerprint). Each
further line is one finished entry. A line without its newline was torn by a kill and is ignored.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from winnow.report.fingerprint import Differences, Fingerprint, differences


def draft_path(path: Path) -> Path:
    """Return the path of the draft, which replaces the journal at `path` (or where that links to) in one move."""
    path = Path(os.path.realpath(path))
    return path.with_name(path.name + ".new")


def create_journal(
    path: Path, form: str, version: int, fingerprint: Fingerprint, entries: bytes = b""
) -> int:
    """Replace the journal at `path` atomically by one with these entries. Returns bytes of the header."""
    header = json.dumps({form: version, "fingerprint": fingerprint}).encode() + b"\n"
    draft = draft_path(path)
    with draft.open("wb") as file:
        file.write(header + entries)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(os.path.realpath(path))
    directory = os.open(draft.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return len(header)


def read_owner(header: bytes, form: str, version: int) -> Fingerprint | None:
    """Return the fingerprint of the run that owns the journal; None if the header is not of that form."""
    record = parse_object(header)
    if record is None or record.get(form) != version:
        return None
    owner = record.get("fingerprint")
    return owner if isinstance(owner, dict) else None


def owner_differences(
    header: bytes, form: str, version: int, fingerprint: Fingerprint, *, answers_alone: bool = False
) -> Differences | None:
    """Compare the journal's owner with `fingerprint`; None if the header is not of that form."""
    owner = read_owner(header, form, version)
    if owner is None:
        return None
    # Through JSON and back, as the stored one: tuples become lists.
    return differences(owner, json.loads(json.dumps(fingerprint)), answers_alone=answers_alone)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines that end in a newline."""
    for line in file:
        if line.endswith(b"\n"):
            yield line


def parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
