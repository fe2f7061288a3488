"""State of a run at this moment: counters of the engine, and tokens per second over the last while."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from winnow.outputs import EngineStats

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
    """Meter of rates, from the engine's counters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, done: int = 0) -> None:
        """Take `done`, the number of requests that were finished before."""
        self._clock = clock
        self._done_before = done
        self._start = clock()
        self._samples = deque([(self._start, 0, 0)])

    @property
    def elapsed(self) -> float:
        """Seconds since the meter was made."""
        return self._clock() - self._start

    def snapshot(self, done: int, total: int, failed: int, stats: EngineStats, at: str = "") -> Snapshot:
        """Take a sample and tell how things stand."""
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
