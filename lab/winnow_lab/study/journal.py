"""Outcomes on disk as they come, so that an evaluation that was killed resumes where it stopped."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from winnow.errors import EvaluationError
from winnow.report.fingerprint import Fingerprint
from winnow.report.journal import create_journal, owner_differences, parse_object, whole_lines
from winnow.report.provenance import commit
from winnow.values.json_values import dump_json

_FORM, _VERSION = "winnow_eval", 1
_logger = logging.getLogger(__name__)


class Entry(Protocol):
    def to_json(self) -> dict[str, Any]:
        """Return JSON values, from which it can be made again."""


_Entry = TypeVar("_Entry", bound=Entry)


class ResultJournal(Generic[_Entry]):
    """A journal (winnow.report.journal) with an entry per line.

    Attributes:
        found: what an earlier evaluation with the same fingerprint left.

    Args:
        read: makes an entry again of what its `to_json` gave.
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

    def __exit__(self, *_: object) -> None:
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


class CellJournal:
    """Rows of cells, each with its commit and date, on disk as they come; None: in memory alone.

    Attributes:
        rows: those found and those added, by cell, in the order measured.

    Args:
        identity: of the work; rows of another are not mixed in.
    """

    _FORM, _VERSION = "winnow_cells", 1

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self._path = path
        self.rows: dict[str, list[dict[str, Any]]] = {}
        if path is None:
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_journal(path, self._FORM, self._VERSION, dict(identity))
        with path.open("r+b") as file:
            header = file.readline()
            found = owner_differences(header, self._FORM, self._VERSION, dict(identity))
            if found is None or found.every:
                why = "no journal of a study" if found is None else "; ".join(found.every)
                raise EvaluationError(f"--journal {path} is of other work: {why}")
            lines = list(whole_lines(file))
            file.truncate(len(header) + sum(map(len, lines)))  # the next row would be appended to a torn one
        for row in filter(None, map(parse_object, lines)):
            self.rows.setdefault(row.pop("cell"), []).append(row)

    def add(self, cell: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a row. Returns it with commit and date; it survives this process."""
        kept = {**row, "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime())}
        self.rows.setdefault(cell, []).append(kept)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(dump_json({"cell": cell, **kept}) + "\n")
        return kept

    def row(self, cell: str) -> dict[str, Any]:
        """Return the only row of a cell, without where it comes from."""
        [row] = self.rows[cell]
        return {name: value for name, value in row.items() if name not in ("commit", "date")}

    @property
    def origins(self) -> str:
        rows = [row for each in self.rows.values() for row in each]
        commits, dates = (sorted({str(row[name]) for row in rows}) for name in ("commit", "date"))
        return f"Measured at commits {', '.join(commits)} on {', '.join(dates)}."
