"""What a run shows while it goes."""

import io
import re
from contextlib import suppress

import pytest

from winnow.cli.screen.progress import LIVE_SECONDS, Meter, Progress, Snapshot, open_progress, plain_line
from winnow.outputs import EngineStats

STATS = EngineStats(
    num_running=5,
    num_waiting=12,
    kv_bytes_used=10 * 2**20,
    kv_bytes_peak=11 * 2**20,
    kv_bytes_budget=64 * 2**20,
    prompt_tokens=100,
    generated_tokens=40,
    num_preemptions=2,
)
SNAPSHOT = Snapshot(12, 64, 1, elapsed=3.0, prefill_rate=321.4, decode_rate=88.0, stats=STATS)


class Clock:
    """Time that passes when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_plain_line() -> None:
    assert plain_line(SNAPSHOT) == (
        "12/64 done, 1 failed | KV 10.0 MiB of 64.0 MiB | prefill 321 tok/s | decode 88 tok/s"
        " | running 5 | waiting 12 | preemptions 2"
    )


def test_a_plain_line_every_few_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(stream, 5.0, clock=clock) as progress:
        shown = []
        for clock.now in (0.0, 4.9, 5.0, 6.0, 10.1):
            shown.append(progress.due())
            if progress.due():
                progress.show(SNAPSHOT)
    assert shown == [False, False, True, False, True]
    assert stream.getvalue() == f"winnow: {plain_line(SNAPSHOT)}\n" * 2


def test_modes() -> None:
    stream = io.StringIO()
    due = {mode: open_progress(mode, stream).due() for mode in ("auto", "rich", "plain", "off")}
    assert due == {"auto": False, "rich": True, "plain": False, "off": False}


def test_the_live_display_shows_the_same_readings() -> None:
    stream = io.StringIO()
    with Progress(stream, LIVE_SECONDS, live=True) as progress:
        assert progress.due()
        progress.show(SNAPSHOT)
        assert not progress.due()
    for text in ("12/64 done, 1 failed, 3 s", "10.0 MiB of 64.0 MiB, peak 11.0 MiB", "| running 5 |"):
        assert text in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", stream.getvalue())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_live_display_stays_where_the_work_is_interrupted(error: type[BaseException] | None) -> None:
    stream = io.StringIO()
    with suppress(KeyboardInterrupt), Progress(stream, LIVE_SECONDS, live=True) as progress:
        progress.show(SNAPSHOT)
        if error is not None:
            raise error
    erases = "\x1b[2K"
    last = stream.getvalue().rpartition("running 5")[2]
    assert (erases in last) == (error is None)


def test_the_time_left_is_at_the_pace_of_this_start() -> None:
    clock = Clock()
    meter = Meter(clock, done=100)
    assert meter.snapshot(100, 160, 0, STATS).seconds_left is None
    clock.now = 30.0
    snapshot = meter.snapshot(110, 160, 0, STATS)
    assert snapshot.seconds_left == 150.0
    assert plain_line(snapshot).endswith(" | preemptions 2 | ETA 0:02:30")


def test_rates_are_of_the_last_while() -> None:
    clock = Clock()
    meter = Meter(clock)
    for clock.now in (1.0, 2.0):
        meter.snapshot(0, 1, 0, EngineStats(prompt_tokens=int(clock.now) * 1000))
    snapshot = meter.snapshot(0, 1, 0, EngineStats(prompt_tokens=2000))
    assert snapshot.prefill_rate == 1000.0
    clock.now = 12.0
    snapshot = meter.snapshot(0, 1, 0, EngineStats(prompt_tokens=2000, generated_tokens=50))
    assert (snapshot.prefill_rate, snapshot.decode_rate, snapshot.elapsed) == (0.0, 5.0, 12.0)
