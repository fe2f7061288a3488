"""Progress on standard error: a live display on a terminal, else a plain line every few seconds."""

import argparse
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from winnow.cli.loading import PLAIN_SECONDS
from winnow.cli.screen.meter import Meter, Snapshot
from winnow.outputs import EngineStats
from winnow.values.units import format_bytes

MODES = ("auto", "rich", "plain", "off")
LIVE_SECONDS = 0.2


class Progress(Protocol):
    """Display of snapshots between the beginning and the end of a `with`."""

    def due(self) -> bool:
        """Return whether it is time for a new snapshot."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def add_progress_flag(parser: "argparse._ActionsContainer", plain: str = "a line every 5 s") -> None:
    """Add the flag of how progress is shown; `plain` says what there is where no terminal is."""
    parser.add_argument(
        "--progress", choices=MODES, default="auto", help=f"auto: live on a terminal, else {plain}"
    )


def open_progress(mode: str, stream: TextIO) -> Progress:
    """Return the display for one of `MODES`."""
    if mode == "auto":
        mode = "rich" if stream.isatty() else "plain"
    if mode == "rich":
        return LiveProgress(stream)
    return PlainProgress(stream, every=PLAIN_SECONDS if mode == "plain" else float("inf"))


def show_steps(
    progress: Progress, meter: Meter, total: int, before: int = 0, at: str = ""
) -> Callable[[int, EngineStats], None]:
    """Return what to call after each step with the number of requests that are done.

    It shows how they stand when it is time.

    Args:
        meter: of the engine that answers them.
        total: requests that are counted together, of which `before` were done before.
        at: what is being worked on.
    """

    def show(done: int, stats: EngineStats) -> None:
        if progress.due():
            progress.show(meter.snapshot(before + done, total, 0, stats, at))

    return show


class PlainProgress:
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._shown_at = clock()

    def due(self) -> bool:
        """Return whether the last line is `every` seconds old."""
        return self._clock() - self._shown_at >= self._every

    def show(self, snapshot: Snapshot) -> None:
        """Write one line."""
        self._shown_at = self._clock()
        print("winnow:", plain_line(snapshot), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave everything as it is: nothing has to be put back."""


class LiveProgress:
    """A display that is redrawn in place, for terminals. It stays where the work is interrupted or fails."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = Live(
            console=Console(file=stream, force_terminal=True, markup=False, emoji=False),
            auto_refresh=False,
            transient=True,
        )
        self._clock = clock
        self._shown_at = -LIVE_SECONDS

    def due(self) -> bool:
        """Return whether the display is old enough to be redrawn."""
        return self._clock() - self._shown_at >= LIVE_SECONDS

    def show(self, snapshot: Snapshot) -> None:
        """Redraw."""
        self._shown_at = self._clock()
        self._live.update(live_display(snapshot), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.transient = error is None
        self._live.stop()


def plain_line(snapshot: Snapshot) -> str:
    """Return one line of text: `12/64 done, 0 failed | KV 10.1 MiB of 64.0 MiB | prefill 321 tok/s | ...`."""
    done = f"{snapshot.done}/{snapshot.total} done, {snapshot.failed} failed"
    return f"{done} | KV {_memory(snapshot)} | {_readings(snapshot)}{_left(snapshot)}"


def live_display(snapshot: Snapshot) -> RenderableType:
    """Return two bars, for the requests and for the KV memory, over the readings."""
    stats = snapshot.stats
    bars = Table.grid(padding=(0, 2))
    bars.add_row(
        "requests",
        ProgressBar(total=max(snapshot.total, 1), completed=snapshot.done, width=30),
        f"{snapshot.done}/{snapshot.total} done, {snapshot.failed} failed, {snapshot.elapsed:.0f} s",
    )
    bars.add_row(
        "KV memory",
        ProgressBar(total=max(stats.kv_bytes_budget, 1), completed=stats.kv_bytes_used, width=30),
        f"{_memory(snapshot)}, peak {format_bytes(stats.kv_bytes_peak)}",
    )
    # What is being worked on may have a name that reads like rich's markup.
    return Group(bars, Text(_readings(snapshot) + _left(snapshot)))


def _left(snapshot: Snapshot) -> str:
    if snapshot.seconds_left is None:
        return ""
    return f" | ETA {timedelta(seconds=round(snapshot.seconds_left))}"


def _memory(snapshot: Snapshot) -> str:
    return f"{format_bytes(snapshot.stats.kv_bytes_used)} of {format_bytes(snapshot.stats.kv_bytes_budget)}"


def _readings(snapshot: Snapshot) -> str:
    stats = snapshot.stats
    at = f"{snapshot.at} | " if snapshot.at else ""
    return (
        f"{at}prefill {snapshot.prefill_rate:.0f} tok/s | decode {snapshot.decode_rate:.0f} tok/s"
        f" | running {stats.num_running} | waiting {stats.num_waiting} | preemptions {stats.num_preemptions}"
    )
