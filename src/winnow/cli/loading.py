"""Lines on standard error while a model is loaded."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

from winnow.process.progress import listening
from winnow.values.units import format_bytes

PATIENCE_SECONDS = 0.8
"""A load that is done by then says nothing; the interpreter has taken a little of the user's first second before."""
PLAIN_SECONDS = 5.0
_REDRAW_SECONDS = 0.1
_BAR_WIDTH = 24


@contextmanager
def show_loading(
    name: str,
    stream: TextIO,
    *,
    doing: str = "loading",
    done: str = "loaded",
    announce: bool = False,
    quiet: bool = False,
    patience: float = PATIENCE_SECONDS,
    every: float | None = None,
) -> Iterator[None]:
    """Show one line with a bar, redrawn, on a terminal; else a line every few seconds. It begins once loading has taken
    a while.

    A thread writes: imports report nothing, and what reads a file seldom.

    Args:
        announce: begin with a line at once.
        patience, every: seconds before the first line, and between two; None: as a terminal or a file needs it.
    """
    live, start, stage, shown, ended = stream.isatty(), time.monotonic(), "", announce, Event()
    began = ("", start, 0)  # the stage that reports, when it did first, and what was done then
    every = every or (_REDRAW_SECONDS if live else PLAIN_SECONDS)

    def say(line: str) -> None:
        print("winnow:", line, file=stream, flush=True)

    def hear(what: str, parts: int, total: int, unit: str) -> None:
        nonlocal stage, began
        now = time.monotonic()
        if what != began[0]:
            began = what, now, parts
        stage = f": {what}"
        if total > 1:
            stage += f" {100 * parts // total} %"
            if live:
                filled = _BAR_WIDTH * parts // total
                stage += f" [{'=' * filled}{' ' * (_BAR_WIDTH - filled)}]"
        if unit == "B" and total > 1:
            rate = (parts - began[2]) / max(now - began[1], 1e-3)
            stage += f" {format_bytes(parts)} of {format_bytes(total)}, {format_bytes(int(rate))}/s"

    def write() -> None:
        nonlocal shown
        wait = every if announce and not live else patience
        while not ended.wait(wait):
            shown, wait = True, every
            line = f"{doing} {name}{stage}, {time.monotonic() - start:.0f} s"
            if live:
                print(f"\r\x1b[Kwinnow: {line}", end="", file=stream, flush=True)
            else:
                say(line)

    if announce:
        say(f"{doing} {name}")
    writer = Thread(target=(lambda: None) if quiet else write, name="winnow-loading", daemon=True)
    writer.start()
    try:
        with listening(hear):
            yield
    finally:
        ended.set()
        writer.join()
        if shown and live:
            print("\r\x1b[K", end="", file=stream, flush=True)
    if shown:
        say(f"{done} {name} in {time.monotonic() - start:.1f} s")
