"""The files of tasks: found, unpacked and read, with errors that name the file and the line."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from winnow.errors import DatasetError

_SHIPPED = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Record:
    """An object of a JSON file, and its place: file and line (or entry), as an error message names them.

    What reads a field raises DatasetError where it is missing or of another kind.
    """

    place: str
    fields: dict[str, Any]

    def text(self, field: str) -> str:
        value = self._value(field)
        if not isinstance(value, str):
            self.fail(f"{field!r} must be a string, not {_kind(value)}")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of at least one string."""
        values = self.entries(field)
        if not values or not all(isinstance(value, str) for value in values):
            self.fail(f"{field!r} must be a list of at least one string")
        return tuple(values)

    def entries(self, field: str) -> list[Any]:
        value = self._value(field)
        if not isinstance(value, list):
            self.fail(f"{field!r} must be a list, not {_kind(value)}")
        return value

    def records(self, field: str) -> list["Record"]:
        return _records(self.entries(field), f"{self.place}, {field!r}")

    def fail(self, reason: str) -> NoReturn:
        raise DatasetError(f"{self.place}: {reason}")

    def _value(self, field: str) -> Any:
        if field not in self.fields:
            self.fail(f"field {field!r} is missing")
        return self.fields[field]


def shipped(task: str) -> Path:
    return _SHIPPED / task


def find_file(directory: Path, name: str, published: str) -> Path:
    """The file of that name in `directory`, or packed as `name`.gz. `published` tells where it is, as "by X"."""
    for candidate in _candidates(directory, name):
        if candidate.is_file():
            return candidate
    if directory.parent == _SHIPPED:
        raise DatasetError(
            f"{name} does not ship with Winnow: --data names a directory that has it; it is published {published}"
        )
    raise DatasetError(f"--data: {directory} has no file {name} (or {name}.gz); it is published {published}")


def has_file(directory: Path, name: str) -> bool:
    return any(candidate.is_file() for candidate in _candidates(directory, name))


def read_text(path: Path) -> str:
    """A file's text, unpacked where its name ends in ".gz"; raises DatasetError where it cannot be read as UTF-8.

    Of a file from another system, the mark at its front is left out, and its lines end in a line feed alone.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
        return text.replace("\r\n", "\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> Record:
    """A file that is one JSON object; raises DatasetError where it is not."""
    return _record(parse_json(read_text(path), str(path)), str(path))


def read_json_list(path: Path) -> list[Record]:
    """A file that is one JSON list of objects; raises DatasetError where it is not."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, list):
        raise DatasetError(f"{path}: expected a JSON list, not {_kind(value)}")
    return _records(value, str(path))


def read_json_lines(path: Path) -> Iterator[Record]:
    """The objects of a file of JSON lines, empty lines left out; raises DatasetError that names file and line."""
    # Not splitlines: JSON may hold line separators of Unicode within a string.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield _record(parse_json(line, place), place)


def parse_json(text: str, place: str) -> Any:
    """What a JSON text says; raises DatasetError with its place where it is not valid."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{place}: not valid JSON: {error}") from None
    except RecursionError:
        raise DatasetError(f"{place}: JSON nested too deep") from None


def _candidates(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / name, directory / f"{name}.gz"


def _records(values: list[Any], place: str) -> list[Record]:
    return [_record(value, f"{place}, entry {number}") for number, value in enumerate(values, start=1)]


def _record(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise DatasetError(f"{place}: expected a JSON object, not {_kind(value)}")
    return Record(place, value)


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def shipped_sentences() -> tuple[str, ...]:
    """Sentences, in order, of two books that the demo model was never trained on (data/SOURCES.md)."""
    return tuple((_SHIPPED / "prose.txt").read_text(encoding="utf-8").splitlines())
