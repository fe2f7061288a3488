"""`OUT.jsonl.journal` beside an output: whose output it is, and results that finished before their turn. Each line
after the header (winnow.report.journal) is an index, a tab, and the record that belongs at that place of the output.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from winnow.batch.reader import InputFile
from winnow.errors import UsageError
from winnow.report import journal as journals
from winnow.report.fingerprint import INPUT_BYTES, Fingerprint, differences
from winnow.report.journal import parse_object, whole_lines
from winnow.values.eviction_request import EVICTION_FIELDS

_FORM, _VERSION = "winnow_run", 1
SHARD = "shard"
"""Name under which the journal of a shard says which one it is; that of a whole run has none."""
OF_REQUESTS = ("detokenize", *EVICTION_FIELDS, "forced_tokens", "structured_outputs")
"""Sampling parameters that only a request can set: for the others the engine has options of its own, positions and
tokens make sense for one prompt alone, and commands show text."""


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".journal")


def encode_entry(index: int, line: bytes) -> bytes:
    """Return the journal's line for the record `line` (with its newline) at place `index` of the output."""
    return b"%d\t%b" % (index, line)


@dataclass(frozen=True)
class Checkpoint:
    """State that an earlier run left behind; empty for the first.

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
    is_of_shorter_input: bool = False
    """The input has grown since: the journal's header must say so before the next line is answered."""
    notes: tuple[str, ...] = ()
    """Differences of the resumed run from the one that began, without an effect on answers."""

    @property
    def num_done(self) -> int:
        return self.finished + len(self.early)


def read_checkpoint(
    output: Path,
    fingerprint: Fingerprint,
    visit: Callable[[dict[str, Any]], None],
    prompts: InputFile | None = None,
) -> Checkpoint:
    """Find out what of `output` is done, changing nothing; `visit` is called with each finished record.

    An output of the first lines of `prompts` may be continued; None: of all of them alone. Raises UsageError: another
    run's output.
    """
    try:
        size = output.stat().st_size if output.exists() else 0
        journal = journal_path(output)
        if not journal.exists():
            if size:
                fault = "exists and no unfinished run left it; pass --overwrite to replace it"
                raise UsageError(f"{output} {fault}")
            return Checkpoint()
        with journal.open("rb") as file:
            grown, notes = _check_owner(file.readline(), output, fingerprint, prompts)
            header_bytes = file.tell()
            entries, journal_bytes = _read_entries(file, header_bytes)
        finished, output_bytes = _read_output(output, visit)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    early = {index: line for index, line in entries.items() if index >= finished}
    for line in early.values():
        visit(json.loads(line))
    return Checkpoint(finished, output_bytes, size, header_bytes, journal_bytes, early, grown, notes)


def read_identity(output: Path) -> dict[str, Any]:
    """Return the fingerprint of the run that wrote `output`. Raises UsageError: it has no journal of a run."""
    try:
        with journal_path(output).open("rb") as file:
            return dict(_owner_of(file.readline(), output))
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error


def _owner_of(header: bytes, output: Path) -> Fingerprint:
    owner = journals.read_owner(header, _FORM, _VERSION)
    if owner is None:
        raise UsageError(f"{journal_path(output)} is not the journal of a run; --overwrite replaces it")
    return owner


def create_journal(output: Path, fingerprint: Fingerprint, state: Checkpoint | None = None) -> Checkpoint:
    """Put a journal with the early records of `state` in place of an old one; what stands where after that."""
    state = Checkpoint() if state is None else state
    entries = b"".join(encode_entry(*item) for item in state.early.items())
    size = journals.create_journal(journal_path(output), _FORM, _VERSION, fingerprint, entries)
    return replace(state, header_bytes=size, journal_bytes=size + len(entries), is_of_shorter_input=False)


def _check_owner(
    header: bytes, output: Path, fingerprint: Fingerprint, prompts: InputFile | None
) -> tuple[bool, tuple[str, ...]]:
    """Return whether the owner answered fewer lines of the input, and the differences without an effect on answers."""
    owner = _owner_of(header, output)
    if "detokenize" in owner:
        # Versions that recorded this wrote parameters of requests, all at their defaults, under names of the engine's.
        owner = {name: value for name, value in owner.items() if name not in OF_REQUESTS}
    grown = (
        prompts is not None
        and owner.get("input") != prompts.sha256
        and prompts.continues(owner.get("input"), owner.get(INPUT_BYTES))
    )
    if grown:
        owner = owner | {"input": fingerprint["input"]}
    # Through JSON and back, as the stored one: tuples become lists.
    found = differences(owner, json.loads(json.dumps(fingerprint)), answers_alone=True)
    if found.refused:
        raise UsageError(
            f"{output} was begun by another run: {'; '.join(found.every)}. "
            "Repeat the same command to resume it, or pass --overwrite to start afresh"
        )
    return grown, found.noted


def _read_entries(file: BinaryIO, start: int) -> tuple[dict[int, bytes], int]:
    """Return the journal's records by index, and how many bytes of the journal are whole."""
    entries, end = dict[int, bytes](), start
    for line in whole_lines(file):
        index, _, record = line.partition(b"\t")
        if not index.isdigit() or parse_object(record) is None:
            break
        entries[int(index)] = record
        end += len(line)
    return entries, end


def _read_output(output: Path, visit: Callable[[dict[str, Any]], None]) -> tuple[int, int]:
    """Return how many lines of the output are whole, and their bytes; all after the first broken line is ignored."""
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
