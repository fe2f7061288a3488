"""Lines per second of one and of two workers on a Ray cluster of this machine, side by side in turns.

    python -m winnow_lab.service.ray_workers --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Workers have started and answered a few lines before a time begins. Needs `pip install '.[ray]'`.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from winnow.batch.reader import WHOLE, RawLine
from winnow.batch.stream import OrderedWriter
from winnow.batch.tally import Tally
from winnow.errors import WinnowError
from winnow_lab.report.tables import TextTable
from winnow_lab.study import ModelOptions, Result, flag, in_turn, run_study


@dataclass(frozen=True)
class Options(ModelOptions):
    """Lines and runs."""

    lines: int = flag(400, "of a run", least=1)
    rounds: int = flag(3, "runs of each number of workers", least=1)


class _Dropped(OrderedWriter):
    """Writer that keeps nothing."""

    def _write(self, index: int) -> None:
        self._take_due()

    def close(self) -> None: ...


def study(options: Options) -> Result:
    """One worker and two, in turn."""
    # Only now: what it does is read without Ray.
    import ray

    from winnow.ray.fleet import Fleet, Placement, connect

    engine = {"kv_memory": "256MiB", "threads": 1} | ({"model": options.model} if options.model else {})

    def rate(workers: int) -> float:
        fleet = Fleet(engine, {}, Placement(workers, 1, 0, None))
        fleet.run(_lines(16 * workers), _Dropped(), Tally(), WHOLE, lambda: None)
        start, tally = time.perf_counter(), Tally()
        fleet.run(_lines(options.lines), _Dropped(), tally, WHOLE, lambda: None)
        seconds = time.perf_counter() - start
        fleet.close()
        if tally.requests != options.lines or tally.failed:
            raise WinnowError(f"{tally.requests} of {options.lines} lines answered, {tally.failed} failed")
        return options.lines / seconds

    connect("local")
    *_, rates = in_turn({"one worker": 1, "two workers": 2}, options.rounds, rate)
    ray.shutdown()
    one, two = (statistics.median(each) for each in rates.values())
    rows = (("one worker", (f"{one:.1f}", "")), ("two workers", (f"{two:.1f}", f"{two / one:.2f}")))
    table = TextTable("Ray workers", "", ("lines/s", "times"), rows)
    return Result("Workers on a Ray cluster", [table], numbers={"rates": rates})


def _lines(count: int) -> Iterator[RawLine]:
    for index in range(count):
        line = {
            "prompt": f"Tale {index}: once upon a time",
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
        }
        yield RawLine(index, index + 1, json.dumps(line).encode())


if __name__ == "__main__":
    sys.exit(run_study(Options, study))
