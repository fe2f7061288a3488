"""Progress on standard error: a live display on a terminal, else a plain line every few seconds."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from winnow.cli.meter import Snapshot
from winnow.units import format_bytes

MODES = ("auto", "rich", "plain", "off")
PLAIN_SECONDS = 5.0
LIVE_SECONDS = 0.2


class Progress(Protocol):
    """Shows snapshots between the beginning and the end of a `with`."""

    def due(self) -> bool:
        """Whether it is time for a new snapshot."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_progress(mode: str, stream: TextIO) -> Progress:
    """The display for one of `MODES`."""
    if mode == "auto":
        mode = "rich" if stream.isatty() else "plain"
    if mode == "rich":
        return LiveProgress(stream)
    return PlainProgress(stream, every=PLAIN_SECONDS if mode == "plain" else float("inf"))


class PlainProgress:
    """A line every few seconds, for logs."""

    def __init__(self, stream: TextIO, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._every = every
        self._clock = clock
        self._shown_at = clock()

    def due(self) -> bool:
        """Whether the last line is `every` seconds old."""
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
        """Nothing was changed that would have to be put back."""


class LiveProgress:
    """A display that is redrawn in place, for terminals."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = Live(
            console=Console(file=stream, force_terminal=True), auto_refresh=False, transient=True
        )
        self._clock = clock
        self._shown_at = -LIVE_SECONDS

    def due(self) -> bool:
        """Whether the display is old enough to be redrawn."""
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
        self._live.stop()


def plain_line(snapshot: Snapshot) -> str:
    """One line of text: `12/64 done, 0 failed | prefill 3210 tok/s, decode 88 tok/s | KV 10.1 of 64.0 MiB | ...`."""
    return " | ".join(f"{name} {value}" if name else value for name, value in _readings(snapshot))


def live_display(snapshot: Snapshot) -> RenderableType:
    """Two bars, for the requests and for the KV memory, over the readings."""
    stats = snapshot.stats
    bars = Table.grid(padding=(0, 2))
    bars.add_row(
        "requests",
        ProgressBar(total=max(snapshot.total, 1), completed=snapshot.done, width=40),
        f"{snapshot.done}/{snapshot.total}",
        f"{snapshot.elapsed:.0f} s",
    )
    bars.add_row(
        "KV memory",
        ProgressBar(total=max(stats.kv_bytes_budget, 1), completed=stats.kv_bytes_used, width=40),
        f"{format_bytes(stats.kv_bytes_used)} of {format_bytes(stats.kv_bytes_budget)}",
        f"peak {format_bytes(stats.kv_bytes_peak)}",
    )
    readings = Table.grid(padding=(0, 2))
    for name, value in _readings(snapshot)[1:]:
        readings.add_row(name, value)
    return Group(bars, readings)


def _readings(snapshot: Snapshot) -> list[tuple[str, str]]:
    """What both displays tell, as (name, value)."""
    stats = snapshot.stats
    used, budget = format_bytes(stats.kv_bytes_used), format_bytes(stats.kv_bytes_budget)
    return [
        ("", f"{snapshot.done}/{snapshot.total} done, {snapshot.failed} failed"),
        ("prefill", f"{snapshot.prefill_rate:.0f} tok/s"),
        ("decode", f"{snapshot.decode_rate:.0f} tok/s"),
        ("KV", f"{used} of {budget}"),
        ("running", str(stats.num_running)),
        ("waiting", str(stats.num_waiting)),
        ("preemptions", str(stats.num_preemptions)),
    ]
