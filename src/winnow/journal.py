"""Files that a killed process may go on from: a header that says whose file it is, then a line for each thing done.

The header is a JSON object with the format's name and a fingerprint (winnow.fingerprint). A line counts once its
newline is there: a process can be killed in the midst of a write, and then the rest of the line is missing, never its
beginning.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from winnow.fingerprint import Fingerprint, differences


def create_journal(path: Path, form: str, version: int, fingerprint: Fingerprint) -> int:
    """Put an empty journal in place of an old one, in one move, so that no reader finds half a header.

    Returns its bytes.
    """
    header = json.dumps({form: version, "fingerprint": fingerprint}).encode() + b"\n"
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return len(header)


def owner_differences(header: bytes, form: str, version: int, fingerprint: Fingerprint) -> list[str] | None:
    """What the journal's owner and `fingerprint` disagree on, in words; None if it is no journal of that form."""
    record = parse_object(header)
    if record is None or record.get(form) != version or not isinstance(record.get("fingerprint"), dict):
        return None
    # Through JSON and back, since the stored one has made that way: tuples are lists there.
    return differences(record["fingerprint"], json.loads(json.dumps(fingerprint)))


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
