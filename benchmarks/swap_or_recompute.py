"""What preempting a request costs, by its length: copying its KVs to the host and back, against computing them again.

    python benchmarks/swap_or_recompute.py [--model DIR] [--lengths 128 512 2048] [--repeat 3] [--threads N]
        [--json FILE]

For each length a prompt is computed, and its request preempted in the middle of its answer, in one way, then the other.
Beside the seconds stands what the engine's cost model, which has seen the runs before, expected of each. The break-even
is the length from which copying is the cheaper way, by the line through the measured points.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from winnow import LLM, SamplingParams
from winnow.engine.preemption_costs import FixedCosts, MeasuredCosts
from winnow.engine.request import Sequence
from winnow.report.provenance import Machine, report_head
from winnow.units import format_bytes

SWAP, RECOMPUTE = FixedCosts(1e-18, 1.0), FixedCosts(1.0, 1e-18)
ANSWER = 8


@dataclass(frozen=True)
class Point:
    """Medians for one length.

    Attributes:
        nbytes: copied each way.
        swap_seconds: out and back; recompute_seconds: of the steps that computed the tokens again.
        expected_swap, expected_recompute: by the cost model, before.
    """

    length: int
    nbytes: int
    swap_seconds: float
    recompute_seconds: float
    expected_swap: float | None
    expected_recompute: float | None


class Preempted:
    """An engine in which one request at a time runs and is preempted."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._scheduler: Any = llm._engine._scheduler  # type: ignore[attr-defined]
        self._preemption = self._scheduler._preemption
        self.costs: MeasuredCosts = self._preemption.costs

    def measure(self, length: int, repeat: int) -> Point:
        """Preempt requests of `length` tokens in both ways, `repeat` times each."""
        swaps, recomputes, nbytes = [], [], 0
        expected: tuple[float | None, float | None] = (None, None)
        for index in range(repeat):
            sequence = self._start(length, index)
            nbytes = self._preemption._copies.nbytes(sequence.kv.running_slot)
            expected = self.costs.swap_seconds(nbytes), self.costs.recompute_seconds(sequence.kv.num_computed)
            self._preempt(sequence, SWAP)
            self._step_until(lambda s=sequence: s.kv.slot is not None)
            swaps.append(sequence.request.metrics.swap_seconds)
            self._preempt(sequence, RECOMPUTE)
            while self._llm.has_unfinished:
                self._llm.step()
            recomputes.append(sequence.request.metrics.recompute_seconds)
        return Point(length, nbytes, statistics.median(swaps), statistics.median(recomputes), *expected)

    def _start(self, length: int, seed: int) -> Sequence:
        random = Random(f"{length} {seed}")  # noqa: S311
        vocabulary = self._llm._engine._executor._model.vocab_size  # type: ignore[attr-defined]
        prompt = [random.randrange(3, vocabulary) for _ in range(length)]
        self._llm.submit(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True, detokenize=False))
        self._step_until(
            lambda: bool(self._scheduler.running) and self._scheduler.running[0].num_output_tokens > 1
        )
        [sequence] = self._scheduler.running
        return sequence

    def _preempt(self, sequence: Sequence, costs: FixedCosts) -> None:
        """Preempt in the way that `costs` prefer; the model of costs goes on learning from the copies."""
        self._preemption.costs = costs
        self._preemption.preempt(sequence, alone=False)
        self._scheduler._put_back(sequence)
        self._preemption.costs = self.costs

    def _step_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._llm.step()


def break_even(points: list[Point]) -> float | None:
    """Tokens from which copying is cheaper, by straight lines; 0: always; None: never."""
    lengths = np.array([point.length for point in points], dtype=float)
    gain = np.array([point.recompute_seconds - point.swap_seconds for point in points])
    if len(points) < 2:
        return 0.0 if gain[0] > 0 else None
    slope, start = np.polyfit(lengths, gain, 1)
    if (gain > 0).all():
        return 0.0
    return None if slope <= 0 else max(float(-start / slope), 0.0)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None, allow_abbrev=False
    )
    parser.add_argument("--model", help="directory or GGUF file (default: the demo model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    longest = max(options.lengths) + ANSWER
    with LLM(
        options.model,
        max_model_len=longest,
        kv_memory="2GiB",
        kv_offloading_size="2GiB",
        enable_prefix_caching=False,
        threads=options.threads,
    ) as llm:
        preempted = Preempted(llm)
        preempted.measure(min(options.lengths), 1)  # first steps are slower
        points = [preempted.measure(length, options.repeat) for length in sorted(options.lengths)]
    console = Console()
    table = Table("tokens", "KVs", "swap ms", "expected", "recompute ms", "expected", "recompute / swap")
    for point in points:
        table.add_row(
            f"{point.length:,}",
            format_bytes(point.nbytes),
            f"{point.swap_seconds * 1e3:.2f}",
            "-" if point.expected_swap is None else f"{point.expected_swap * 1e3:.2f}",
            f"{point.recompute_seconds * 1e3:.1f}",
            "-" if point.expected_recompute is None else f"{point.expected_recompute * 1e3:.1f}",
            f"{point.recompute_seconds / point.swap_seconds:.1f}",
        )
    machine = Machine.here()
    console.print(str(machine))
    console.print(table)
    found = break_even(points)
    console.print(
        "copying is never cheaper here"
        if found is None
        else "copying is cheaper at every length"
        if not found
        else f"copying is cheaper from {found:,.0f} tokens on"
    )
    if options.json is not None:
        report = report_head(sys.argv, machine) | {
            "points": [asdict(point) for point in points],
            "break_even": found,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
