"""Results on standard output, for another program to read: in input order, and nothing to resume from."""

from types import TracebackType
from typing import BinaryIO, Protocol, Self


class Writer(Protocol):
    """Where results go."""

    @property
    def num_early(self) -> int:
        """Results that wait for an earlier one."""

    def holds(self, index: int) -> bool:
        """Whether there is a result for place `index` already."""

    def put(self, index: int, line: bytes) -> None:
        """Take the result of place `index`: one line of JSON with its newline."""


class StreamWriter:
    """Writes results in input order as soon as their turn has come."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._early: dict[int, bytes] = {}
        self._next = 0

    @property
    def num_early(self) -> int:
        """Results that wait for an earlier one."""
        return len(self._early)

    def holds(self, index: int) -> bool:
        """Whether there is a result for place `index` already."""
        return index < self._next or index in self._early

    def put(self, index: int, line: bytes) -> None:
        """Take the result of place `index`: one line of JSON with its newline."""
        assert not self.holds(index), f"line {index} was answered twice"
        self._early[index] = line
        while (due := self._early.pop(self._next, None)) is not None:
            self._stream.write(due)
            self._next += 1
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All that was due has been written."""
