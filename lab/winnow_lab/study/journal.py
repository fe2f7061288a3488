"""Outcomes on disk as they come, so that an evaluation that was killed resumes where it stopped."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from winnow.errors import EvaluationError
from winnow.report.fingerprint import Fingerprint
from winnow.report.journal import create_journal, owner_differences, parse_object, whole_lines
from winnow.values.json_values import dump_json

_FORM, _VERSION = "winnow_eval", 1
_logger = logging.getLogger(__name__)


class Entry(Protocol):
    """Entry of a journal."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, from which it can be made again."""


_Entry = TypeVar("_Entry", bound=Entry)


class ResultJournal(Generic[_Entry]):
    """A journal (winnow.report.journal) with an entry per line.

    Attributes:
        found: what an earlier evaluation with the same fingerprint left.

    Args:
        read: makes an entry again of what its `to_json` gave.
        overwrite: start afresh.
        answers_alone: options of the engine that change no answer may differ; a warning is logged.

    Raises:
        EvaluationError: the file is of an evaluation with other settings, or of something else, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        read: Callable[[dict[str, Any]], _Entry],
        *,
        overwrite: bool = False,
        answers_alone: bool = False,
    ) -> None:
        self.found: list[_Entry] = []
        self._read_entry = read
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if overwrite or not path.exists():
                create_journal(path, _FORM, _VERSION, fingerprint)
                end = path.stat().st_size
            else:
                end = self._read(path, fingerprint, answers_alone)
            self._file = path.open("r+b")
            # The next line would be appended to a torn one.
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            raise EvaluationError(f"cannot use the journal {path}: {error.strerror}") from error

    def append(self, entries: Iterable[_Entry]) -> None:
        """Add entries; they survive this process once this returns."""
        lines = [dump_json(entry.to_json(), ensure_ascii=False) + "\n" for entry in entries]
        self._file.write("".join(lines).encode())
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read(self, path: Path, fingerprint: Fingerprint, answers_alone: bool) -> int:
        """Fill `found`; the bytes of the file that are whole."""
        with path.open("rb") as file:
            header = file.readline()
            found = owner_differences(header, _FORM, _VERSION, fingerprint, answers_alone=answers_alone)
            if found is None:
                raise EvaluationError(f"{path} is not the journal of an evaluation; --overwrite replaces it")
            if found.refused:
                raise EvaluationError(
                    f"{path.parent} holds an evaluation with other settings: {'; '.join(found.every)}. "
                    "Repeat the same command to resume it, or pass --overwrite to start afresh"
                )
            if found.noted:
                _logger.warning("winnow: resuming %s although %s", path, "; ".join(found.noted))
            end = len(header)
            for line in whole_lines(file):
                values = parse_object(line)
                if values is None:
                    break
                self.found.append(self._read_entry(values))
                end += len(line)
        return end
