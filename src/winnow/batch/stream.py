"""Writers: results go out in input order, whatever the order they come in."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import BinaryIO, Self


class OrderedWriter(ABC):
    """Writer that holds each result until all before it are written.

    Args:
        first: the first place that has no result yet.
        early: results behind that place, by place.
    """

    def __init__(self, first: int = 0, early: Mapping[int, bytes] | None = None) -> None:
        self._next = first
        self._early = dict(early or {})

    @property
    def num_early(self) -> int:
        """Results that wait for an earlier one."""
        return len(self._early)

    def holds(self, index: int) -> bool:
        """Return whether there is a result for place `index` already."""
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
    def close(self) -> None:
        """Release what is open."""

    def _take_due(self) -> Iterator[bytes]:
        """Yield results whose turn has come. One counts as written when the next is asked for."""
        while (line := self._early.pop(self._next, None)) is not None:
            yield line
            self._next += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
