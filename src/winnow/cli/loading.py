"""Lines on standard error while a model is loaded."""

import time
from threading import Event, Thread
from types import TracebackType
from typing import Self, TextIO

from winnow.process.progress import listening

PATIENCE_SECONDS = 0.8
"""A load that is done by then says nothing; the interpreter has taken a little of the user's first second before."""
PLAIN_SECONDS = 5.0
_REDRAW_SECONDS = 0.1


class LoadingDisplay:
    """One line, redrawn, on a terminal; else a line every few seconds. It begins once loading has taken a while.

    A thread writes: imports report nothing, and what reads a file seldom.

    Args:
        name: of the model, or of what else takes long.
        doing, done: what is said of it meanwhile, and at the end.
        announce: begin with a line at once.
        quiet: say nothing.
        patience, every: seconds before the first line, and between two; None: as a terminal or a file needs it.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO,
        *,
        doing: str = "loading",
        done: str = "loaded",
        announce: bool = False,
        quiet: bool = False,
        patience: float | None = None,
        every: float | None = None,
    ) -> None:
        self._name, self._stream, self._stage = name, stream, ""
        self._doing, self._done = doing, done
        self._live = stream.isatty()
        self._every = every or (_REDRAW_SECONDS if self._live else PLAIN_SECONDS)
        patience = PATIENCE_SECONDS if patience is None else patience
        self._patience = self._every if announce and not self._live else patience
        self._start = time.monotonic()
        self._shown = announce
        self._listening = listening(self._hear)
        self._ended = Event()
        self._writer = None if quiet else Thread(target=self._write, name="winnow-loading", daemon=True)
        if announce:
            self._print(f"{doing} {name}")

    def __enter__(self) -> Self:
        self._listening.__enter__()
        if self._writer is not None:
            self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(kind, error, trace)
        self._ended.set()
        if self._writer is not None:
            self._writer.join()
        if not self._shown:
            return
        if self._live:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
        if error is None:
            self._print(f"{self._done} {self._name} in {time.monotonic() - self._start:.1f} s")

    def _hear(self, stage: str, done: int, total: int) -> None:
        self._stage = f": {stage}" + (f" {100 * done // total} %" if total > 1 else "")

    def _write(self) -> None:
        wait = self._patience
        while not self._ended.wait(wait):
            self._shown, wait = True, self._every
            line = f"{self._doing} {self._name}{self._stage}, {time.monotonic() - self._start:.0f} s"
            if self._live:
                print(f"\r\x1b[Kwinnow: {line}", end="", file=self._stream, flush=True)
            else:
                self._print(line)

    def _print(self, line: str) -> None:
        print("winnow:", line, file=self._stream, flush=True)
