"""Files that a killed process may go on from: a header that says whose file it is, then a line for each thing done.

The header is a JSON object with the format's name and a fingerprint (winnow.report.fingerprint). A line counts once its
newline is there: a process can be killed in the midst of a write, and then the rest of the line is missing, never its
beginning.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from winnow.report.fingerprint import Differences, Fingerprint, differences


def draft_path(path: Path) -> Path:
    """Where a journal is written before it takes its place at `path`."""
    return path.with_name(path.name + ".new")


def create_journal(
    path: Path, form: str, version: int, fingerprint: Fingerprint, entries: bytes = b""
) -> int:
    """Put a journal with these whole lines in place of an old one, in one move, so that no reader finds half of it.

    Returns the bytes of its header.
    """
    header = json.dumps({form: version, "fingerprint": fingerprint}).encode() + b"\n"
    draft = draft_path(path)
    with draft.open("wb") as file:
        file.write(header + entries)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return len(header)


def read_owner(header: bytes, form: str, version: int) -> Fingerprint | None:
    """The fingerprint of the journal's owner; None if it is no journal of that form."""
    record = parse_object(header)
    if record is None or record.get(form) != version:
        return None
    owner = record.get("fingerprint")
    return owner if isinstance(owner, dict) else None


def owner_differences(
    header: bytes, form: str, version: int, fingerprint: Fingerprint, *, answers_alone: bool = False
) -> Differences | None:
    """What the journal's owner and `fingerprint` disagree on; None if it is no journal of that form."""
    owner = read_owner(header, form, version)
    if owner is None:
        return None
    # Through JSON and back, since the stored one has made that way: tuples are lists there.
    return differences(owner, json.loads(json.dumps(fingerprint)), answers_alone=answers_alone)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines that end in a newline; the torn rest of the file is left out."""
    for line in file:
        if line.endswith(b"\n"):
            yield line


def parse_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, None where there is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
