"""Progress on standard error: a live display on a terminal, else a plain line every few seconds."""

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from winnow.cli.loading import PLAIN_SECONDS
from winnow.outputs import EngineStats
from winnow.values.units import format_bytes

MODES = ("auto", "rich", "plain", "off")
LIVE_SECONDS = 0.2
WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Snapshot:
    """Numbers of a progress display. Rates are tokens per second over the last `WINDOW_SECONDS`."""

    done: int
    total: int
    failed: int
    elapsed: float
    prefill_rate: float
    decode_rate: float
    stats: EngineStats
    at: str = ""
    """Work in progress, where there is more than one kind of work."""
    seconds_left: float | None = None
    """Until all is done, at the pace up to now; None before anything is."""


class Meter:
    """Meter of rates, from the engine's counters; `done` requests were finished before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, done: int = 0) -> None:
        self._clock = clock
        self._done_before = done
        self._start = clock()
        self._samples = deque([(self._start, 0, 0)])

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def snapshot(self, done: int, total: int, failed: int, stats: EngineStats, at: str = "") -> Snapshot:
        now = self._clock()
        self._samples.append((now, stats.prompt_tokens, stats.generated_tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        then, prompt_tokens, generated_tokens = self._samples[0]
        seconds = max(now - then, 1e-9)
        finished = done - self._done_before
        return Snapshot(
            done,
            total,
            failed,
            elapsed=now - self._start,
            prefill_rate=(stats.prompt_tokens - prompt_tokens) / seconds,
            decode_rate=(stats.generated_tokens - generated_tokens) / seconds,
            stats=stats,
            at=at,
            seconds_left=(now - self._start) / finished * (total - done) if finished > 0 else None,
        )


class Progress:
    """Display of snapshots between the beginning and the end of a `with`: a line `every` few seconds, or redrawn in
    place on a terminal (`live`), where it stays if the work is interrupted or fails.
    """

    def __init__(
        self, stream: TextIO, every: float, *, live: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._every, self._clock = stream, every, clock
        self._shown_at = clock() - every * live  # a live display shows something at once
        console = Console(file=stream, force_terminal=True, markup=False, emoji=False)
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def due(self) -> bool:
        return self._clock() - self._shown_at >= self._every

    def show(self, snapshot: Snapshot) -> None:
        self._shown_at = self._clock()
        if self._live is None:
            print("winnow:", plain_line(snapshot), file=self._stream, flush=True)
        else:
            self._live.update(live_display(snapshot), refresh=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._live is not None:
            self._live.transient = error is None
            self._live.stop()


def add_progress_flag(parser: "argparse._ActionsContainer", plain: str = "a line every 5 s") -> None:
    parser.add_argument(
        "--progress", choices=MODES, default="auto", help=f"auto: live on a terminal, else {plain}"
    )


def open_progress(mode: str, stream: TextIO) -> Progress:
    if mode == "rich" or (mode == "auto" and stream.isatty()):
        return Progress(stream, LIVE_SECONDS, live=True)
    return Progress(stream, float("inf") if mode == "off" else PLAIN_SECONDS)


def show_steps(
    progress: Progress, meter: Meter, total: int, before: int = 0, at: str = ""
) -> Callable[[int, EngineStats], None]:
    """Return what shows progress after a step, when it is time: done are its argument and `before`, of `total`."""

    def show(done: int, stats: EngineStats) -> None:
        if progress.due():
            progress.show(meter.snapshot(before + done, total, 0, stats, at))

    return show


def plain_line(snapshot: Snapshot) -> str:
    """Return such as `12/64 done, 0 failed | KV 10.1 MiB of 64.0 MiB | prefill 321 tok/s | ...`."""
    done = f"{snapshot.done}/{snapshot.total} done, {snapshot.failed} failed"
    return f"{done} | KV {_memory(snapshot)} | {_readings(snapshot)}{_left(snapshot)}"


def live_display(snapshot: Snapshot) -> RenderableType:
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
