"""The input file, read lazily: a pile of prompts is never held whole."""

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winnow.errors import UsageError

MAX_LINE_BYTES = 64 * 2**20
"""Longer lines are not read into memory; they count as one bad line."""
_BUFFER_BYTES = 2**20


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
class Shard:
    """A share of the lines: of every `count` lines the `number`-th, so that shards take the same time. 1/1: all."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read `NUMBER/COUNT`; raises UsageError."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise UsageError(f"--shard must be NUMBER/COUNT with 1 <= NUMBER <= COUNT, got {text!r:.80}")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, index: int) -> bool:
        return index % self.count == self.number - 1

    def place(self, index: int) -> int:
        """Return where in its output the record of line `index` stands."""
        return index // self.count

    def num_lines(self, total: int) -> int:
        return (total + self.count - self.number) // self.count


@dataclass(frozen=True)
class InputFile:
    """Identity of the input file, and the number of requests that it holds.

    `repeated` holds custom_id, and the numbers of two lines that have it, for each line whose custom_id is not new.
    """

    path: Path
    sha256: str
    num_bytes: int
    num_requests: int
    repeated: tuple[tuple[str, int, int], ...] = field(default=(), repr=False)

    @classmethod
    def scan(cls, path: Path) -> "InputFile":
        """Read through the file, holding one line at a time. Raises UsageError: it cannot be read."""
        lines_of: dict[str, int] = {}
        repeated = []
        num_requests = 0
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                num_bytes = file.tell()
            for line in read_lines(path):
                num_requests += 1
                name = _custom_id(line.data)
                if name is not None and lines_of.setdefault(name, line.number) != line.number:
                    repeated.append((name, lines_of[name], line.number))
        except OSError as error:
            raise UsageError(f"cannot read the prompts {path}: {error.strerror}") from error
        return cls(path, digest, num_bytes, num_requests, tuple(repeated))

    def continues(self, sha256: Any, num_bytes: Any) -> bool:
        """Return whether this is a file of `num_bytes` bytes with that digest, and lines that were added to it."""
        if type(num_bytes) is not int or not 0 < num_bytes < self.num_bytes:
            return False
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            left, last = num_bytes, b""
            while left and (last := file.read(min(left, _BUFFER_BYTES))):
                digest.update(last)
                left -= len(last)
            follows = file.read(2)
        # A line that continued would be another question.
        whole = last.endswith(b"\n") or follows.startswith((b"\n", b"\r\n"))
        return whole and digest.hexdigest() == sha256


def read_lines(path: Path) -> Iterator[RawLine]:
    """Yield the lines of `path` that are not blank, one at a time."""
    index = 0
    with path.open("rb") as file:
        number = 0
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
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


def _custom_id(data: bytes | None) -> str | None:
    if data is None or b'"custom_id"' not in data:
        return None
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    name = line.get("custom_id") if isinstance(line, dict) else None
    return None if name is None or isinstance(name, dict | list) else str(name)
