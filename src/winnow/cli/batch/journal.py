"""The file beside an output: whose output it is, and results that finished before their turn.

`OUT.jsonl.journal` is a journal (winnow.journal). Each line after its header is an index, a tab, and the record that
belongs at that place of the output.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from winnow import journal as journals
from winnow.cli.errors import UsageError
from winnow.fingerprint import Fingerprint
from winnow.journal import parse_object, whole_lines

_FORM, _VERSION = "winnow_run", 1


def journal_path(output: Path) -> Path:
    """Where the journal of `output` lies."""
    return output.with_name(output.name + ".journal")


def encode_entry(index: int, line: bytes) -> bytes:
    """The journal's line for the record `line` (with its newline) at place `index` of the output."""
    return b"%d\t%b" % (index, line)


@dataclass(frozen=True)
class Checkpoint:
    """What an earlier run left behind; nothing, for the first.

    `finished` lines of the output are whole, in `output_bytes` bytes; what lies beyond, up to `output_size`, is torn.
    The first `header_bytes` of the journal are its header, its first `journal_bytes` are whole; `early` holds its
    records that are not yet in the output.
    """

    finished: int = 0
    output_bytes: int = 0
    output_size: int = 0
    header_bytes: int = 0
    journal_bytes: int = 0
    early: dict[int, bytes] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        """Requests that need no more work."""
        return self.finished + len(self.early)


def read_checkpoint(
    output: Path, fingerprint: Fingerprint, visit: Callable[[dict[str, Any]], None]
) -> Checkpoint:
    """Find out what of `output` is done, changing nothing; `visit` is called with each finished record.

    Raises:
        UsageError: the output belongs to a run with another fingerprint, or to something else.
    """
    try:
        size = output.stat().st_size if output.exists() else 0
        journal = journal_path(output)
        if not journal.exists():
            if size:
                raise UsageError(
                    f"{output} exists and no unfinished run left it; pass --overwrite to replace it"
                )
            return Checkpoint()
        with journal.open("rb") as file:
            _check_owner(file.readline(), output, fingerprint)
            header_bytes = file.tell()
            entries, journal_bytes = _read_entries(file, header_bytes)
        finished, output_bytes = _read_output(output, visit)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    early = {index: line for index, line in entries.items() if index >= finished}
    for line in early.values():
        visit(json.loads(line))
    return Checkpoint(finished, output_bytes, size, header_bytes, journal_bytes, early)


def create_journal(output: Path, fingerprint: Fingerprint) -> Checkpoint:
    """Put an empty journal in place of an old one."""
    size = journals.create_journal(journal_path(output), _FORM, _VERSION, fingerprint)
    return Checkpoint(header_bytes=size, journal_bytes=size)


def _check_owner(header: bytes, output: Path, fingerprint: Fingerprint) -> None:
    told = journals.owner_differences(header, _FORM, _VERSION, fingerprint)
    if told is None:
        raise UsageError(
            f"{journal_path(output)} is not the journal of a run; pass --overwrite to replace it"
        )
    if told:
        raise UsageError(
            f"{output} was begun by another run: {'; '.join(told)}. "
            "Repeat the same command to resume it, or pass --overwrite to start afresh"
        )


def _read_entries(file: BinaryIO, start: int) -> tuple[dict[int, bytes], int]:
    """The journal's records by index, and how many bytes of the journal are whole."""
    entries: dict[int, bytes] = {}
    end = start
    for line in whole_lines(file):
        index, _, record = line.partition(b"\t")
        if not index.isdigit() or parse_object(record) is None:
            break
        entries[int(index)] = record
        end += len(line)
    return entries, end


def _read_output(output: Path, visit: Callable[[dict[str, Any]], None]) -> tuple[int, int]:
    """How many lines of the output are whole, and their bytes. After the first broken line nothing is trusted."""
    finished = end = 0
    if not output.exists():
        return finished, end
    with output.open("rb") as file:
        for line in whole_lines(file):
            record = parse_object(line)
            if record is None:
                break
            visit(record)
            finished += 1
            end += len(line)
    return finished, end
