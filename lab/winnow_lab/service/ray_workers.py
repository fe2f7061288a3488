"""Lines per second of one and of two workers on a Ray cluster of this machine, side by side in turns.

    python -m winnow_lab.service.ray_workers --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Workers have started and answered a few lines before a time begins. Needs `pip install '.[ray]'`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator

from winnow.batch.reader import WHOLE, RawLine
from winnow.batch.stream import OrderedWriter
from winnow.batch.tally import Tally
from winnow.report.provenance import Machine


class _Dropped(OrderedWriter):
    """Writer that keeps nothing."""

    def _write(self, index: int) -> None:
        self._take_due()

    def close(self) -> None: ...


def main() -> None:
    """Measure, and print medians with their quotient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="left out: the demo model")
    parser.add_argument("--lines", type=int, default=400, help="of a run (default: 400)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each number of workers (default: 3)")
    asked = parser.parse_args()
    # Only now: what it does is read without Ray.
    import ray

    from winnow.ray.fleet import Fleet, Placement, connect

    options = {"kv_memory": "256MiB", "threads": 1} | ({"model": asked.model} if asked.model else {})
    connect("local")
    rates: dict[int, list[float]] = {}
    for _ in range(asked.rounds):
        for workers in (1, 2):
            fleet = Fleet(options, {}, Placement(workers, 1, 0, None))
            fleet.run(_lines(16 * workers), _Dropped(), Tally(), WHOLE, lambda: None)
            start, tally = time.perf_counter(), Tally()
            fleet.run(_lines(asked.lines), _Dropped(), tally, WHOLE, lambda: None)
            rates.setdefault(workers, []).append(asked.lines / (time.perf_counter() - start))
            fleet.close()
            if tally.requests != asked.lines or tally.failed:
                raise SystemExit(f"{tally.requests} of {asked.lines} lines answered, {tally.failed} failed")
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    print(Machine.here("cpu"))
    print(f"one worker {one:.1f} lines/s, two {two:.1f} lines/s: {two / one:.2f} times")
    ray.shutdown()


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
    main()
