"""The output file: every result once, in input order, on disk as soon as it is finished.

A result that is due goes to the output; an early one goes to the journal and is kept in memory. Both files grow by
whole lines, so a killed process leaves at most one torn line at the end of each. The journal is emptied once all of its
records are in the output.
"""

import fcntl
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from winnow.batch.journal import Checkpoint, create_journal, encode_entry, journal_path
from winnow.errors import UsageError
from winnow.report.fingerprint import Fingerprint

SYNC_SECONDS = 1.0
"""Work that a loss of power may cost; a killed process loses nothing that was written."""

JOURNAL_BYTES = 2**20
"""A journal whose records are all in the output is emptied from this size on, and at the end."""


class OutputError(UsageError):
    """Results cannot be written; those that were are safe, and the run can be resumed."""


class OrderedWriter(AbstractContextManager["OrderedWriter"]):
    """Writer that holds each result until all before it are written: `first` is the first place without a result,
    `early` are results behind it, by place.
    """

    def __init__(self, first: int = 0, early: Mapping[int, bytes] | None = None) -> None:
        self._next = first
        self._early = dict(early or {})

    @property
    def num_early(self) -> int:
        return len(self._early)

    def holds(self, index: int) -> bool:
        return index < self._next or index in self._early

    def put(self, index: int, line: bytes) -> None:
        """Take the result of place `index`: one line of JSON with its newline."""
        assert not self.holds(index), f"line {index} was answered twice"
        self._early[index] = line
        self._write(index)

    @abstractmethod
    def _write(self, index: int) -> None:
        """Write what is due after a result came for place `index`."""

    @abstractmethod
    def close(self) -> None: ...

    def _take_due(self) -> Iterator[bytes]:
        """Yield results whose turn has come. One counts as written when the next is asked for."""
        while (line := self._early.pop(self._next, None)) is not None:
            yield line
            self._next += 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class StreamWriter(OrderedWriter):
    """Writer of results to standard output, for another program to read; nothing can be resumed."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def _write(self, index: int) -> None:
        for line in self._take_due():
            self._stream.write(line)
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open: it is the caller's, and all that was due has been written."""


class ResultWriter(OrderedWriter):
    """Writer of results to a file, and of early ones to its journal, so that a run can be resumed.

    One process at a time: the output is locked for as long as the writer is open.
    """

    def __init__(
        self,
        output: Path,
        fingerprint: Fingerprint,
        checkpoint: Checkpoint | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue after `checkpoint`, repairing what was torn; without one, start afresh and drop what is there.
        Raises UsageError: the file cannot be written, or another process writes it."""
        self._clock = clock
        self._path = output
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            self._output = _open_locked(output)
            if checkpoint is None:
                # In this order: a kill in between leaves an empty output, never an old one with a new journal.
                self._output.truncate(0)
                checkpoint = create_journal(output, fingerprint)
            elif os.fstat(self._output.fileno()).st_size != checkpoint.output_size:
                raise UsageError(f"{output} was changed by another process just now; run the command again")
            elif checkpoint.is_of_shorter_input or not journal_path(output).exists():
                checkpoint = create_journal(output, fingerprint, checkpoint)
            self._journal = journal_path(output).open("r+b")
        except OSError as error:
            raise UsageError(f"cannot write {error.filename or output}: {error.strerror}") from error
        self._header_bytes = checkpoint.header_bytes
        self._journal_bytes = checkpoint.journal_bytes
        super().__init__(checkpoint.finished, checkpoint.early)
        self._synced_at = clock()
        _cut(self._output, checkpoint.output_bytes)
        _cut(self._journal, checkpoint.journal_bytes)
        self._write_due()

    def _write(self, index: int) -> None:
        with self._disk_errors():
            if index == self._next:
                self._write_due()
            else:
                self._journal_bytes += self._journal.write(encode_entry(index, self._early[index]))
                self._journal.flush()
            if self._clock() - self._synced_at >= SYNC_SECONDS:
                self.sync()

    def sync(self) -> None:
        """Make everything put so far survive a loss of power."""
        os.fsync(self._output.fileno())
        os.fsync(self._journal.fileno())
        self._synced_at = self._clock()

    def close(self) -> None:
        with self._disk_errors():
            try:
                self._empty_journal()
                self.sync()
            finally:
                for file in (self._journal, self._output):
                    with suppress(OSError):  # the failed write has been reported
                        file.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except UsageError:
            # A full disk fails here again; the first error is the one to report.
            if error is None:
                raise

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Raise what the disk refuses as `OutputError`. What was written stays; a resume cuts a torn line."""
        try:
            yield
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error

    def _write_due(self) -> None:
        for line in self._take_due():
            self._output.write(line)
        self._output.flush()
        if self._journal_bytes - self._header_bytes >= JOURNAL_BYTES:
            self._empty_journal()

    def _empty_journal(self) -> None:
        """Drop the journal's records if all of them are in the output."""
        if not self._early and self._journal_bytes > self._header_bytes:
            # The output must be on disk before the only other copy goes.
            os.fsync(self._output.fileno())
            self._journal_bytes = self._header_bytes
            _cut(self._journal, self._header_bytes)


def _open_locked(output: Path) -> BinaryIO:
    """Open `output` for reading and writing, created where missing, and lock it against other processes."""
    descriptor = os.open(output, os.O_RDWR | os.O_CREAT, 0o644)
    file = os.fdopen(descriptor, "r+b")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UsageError(f"another run is writing {output}") from error
    return file


def _cut(file: BinaryIO, size: int) -> None:
    """End the file after `size` bytes and write on from there."""
    file.truncate(size)
    file.seek(size)
