"""The input file, read lazily: a pile of prompts is never held whole."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from winnow.cli.errors import UsageError

MAX_LINE_BYTES = 64 * 2**20
"""Longer lines are not read into memory; they count as one bad line."""


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank.

    `index` counts such lines from 0 and is the place of its record in the output; `number` is the line number an editor
    shows. `data` is None where the line is longer than `MAX_LINE_BYTES`.
    """

    index: int
    number: int
    data: bytes | None


@dataclass(frozen=True)
class InputFile:
    """How many requests the input holds, and which file it is."""

    path: Path
    sha256: str
    num_requests: int

    @classmethod
    def scan(cls, path: Path) -> "InputFile":
        """Read through the file, holding one line at a time.

        Raises:
            UsageError: the file is missing, no file, or unreadable.
        """
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(path, digest, sum(1 for _ in read_lines(path)))
        except OSError as error:
            raise UsageError(f"cannot read the prompts {path}: {error.strerror}") from error


def read_lines(path: Path) -> Iterator[RawLine]:
    """The lines of `path` that are not blank, one at a time."""
    index = 0
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                while not data.endswith(b"\n") and (data := file.readline(MAX_LINE_BYTES)):
                    pass
                yield RawLine(index, number, None)
                index += 1
            elif data.strip():
                yield RawLine(index, number, data)
                index += 1
