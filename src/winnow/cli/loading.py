"""Lines on standard error while a model is loaded."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from winnow.cli.progress import PLAIN_SECONDS
from winnow.progress import listening

_PATIENCE_SECONDS = 1.0
_REDRAW_SECONDS = 0.1


class LoadingDisplay:
    """One line, redrawn, on a terminal, once loading has taken a second; else a line every few seconds.

    Args:
        name: of the model.
        announce: begin with a line at once.
        quiet: say nothing.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO,
        *,
        announce: bool = False,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._name, self._stream, self._clock = name, stream, clock
        self._live = stream.isatty()
        self._start = clock()
        self._due_at = self._start + (_PATIENCE_SECONDS if self._live else PLAIN_SECONDS)
        self._shown = announce
        self._listening = listening(self._hear)
        if announce:
            self._print(f"loading {name}")

    def __enter__(self) -> Self:
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(kind, error, trace)
        if not self._shown:
            return
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        if error is None:
            self._print(f"loaded {self._name} in {self._clock() - self._start:.1f} s")

    def _hear(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if self._quiet or now < self._due_at:
            return
        self._shown, self._due_at = True, now + (_REDRAW_SECONDS if self._live else PLAIN_SECONDS)
        part = f" {100 * done // total} %" if total > 1 else ""
        line = f"loading {self._name}: {stage}{part}, {now - self._start:.0f} s"
        if self._live:
            print(f"\r\x1b[Kwinnow: {line}", end="", file=self._stream, flush=True)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        print("winnow:", line, file=self._stream, flush=True)
