"""Progress on standard error: a live display on a terminal, else a plain line every few seconds."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from winnow.cli.meter import Snapshot
from winnow.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

MODES = ("auto", "rich", "plain", "off")
PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.2


class Progress(Protocol):
    """Shows snapshots between `with` and its end."""

    def due(self) -> bool:
        """Whether it is time for a new snapshot."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_progress(mode: str, stream: TextIO = sys.stderr) -> Progress:
    """The display for one of `MODES`."""
    if mode == "auto":
        mode = "rich" if stream.isatty() else "plain"
    if mode == "rich":
        return LiveProgress(stream)
    return PlainProgress(stream, every=PLAIN_SECONDS if mode == "plain" else float("inf"))
