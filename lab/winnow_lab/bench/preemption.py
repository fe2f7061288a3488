"""Cost of preempting a request, by its length: copying its KVs out and back, against computing them again."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.request import Sequence as Sample
from winnow.llm import LLM
from winnow.values.units import format_bytes
from winnow_lab.bench.answering import fixed_length
from winnow_lab.report.tables import TextTable

SWAP, RECOMPUTE = SwapCosts(1e-18, 1.0), SwapCosts(1.0, 1e-18)
ANSWER = 8
"""Tokens of an answer, in whose midst its request is preempted."""


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
        self._scheduler: Any = llm._engine.scheduler
        self._preemption = self._scheduler.memory.swap
        self.costs: SwapCosts = self._preemption.costs

    def measure(self, length: int, repeat: int) -> Point:
        """Preempt requests of `length` tokens in both ways, `repeat` times each."""
        swaps, recomputes, nbytes = [], [], 0
        expected: tuple[float | None, float | None] = (None, None)
        for index in range(repeat):
            sequence = self._start(length, index)
            nbytes = self._preemption.copy_bytes(sequence.kv.running_slot)
            expected = self.costs.swap_seconds(nbytes), self.costs.recompute_seconds(sequence.kv.num_computed)
            self._preempt(sequence, SWAP)
            while sequence.kv.slot is None:
                self._llm.step()
            swaps.append(sequence.request.metrics.swap_seconds)
            self._preempt(sequence, RECOMPUTE)
            while self._llm.has_unfinished:
                self._llm.step()
            recomputes.append(sequence.request.metrics.recompute_seconds)
        return Point(length, nbytes, statistics.median(swaps), statistics.median(recomputes), *expected)

    def _start(self, length: int, seed: int) -> Sample:
        random = Random(f"{length} {seed}")
        prompt = [random.randrange(3, self._llm.vocab_size) for _ in range(length)]
        self._llm.submit(prompt, fixed_length(ANSWER))
        while not (self._scheduler.running and self._scheduler.running[0].num_output_tokens > 1):
            self._llm.step()
        [sequence] = self._scheduler.running
        return sequence

    def _preempt(self, sequence: Sample, costs: SwapCosts) -> None:
        """Preempt in the way that `costs` prefer; the model of costs keeps learning from the copies."""
        self._preemption.costs = costs
        self._scheduler.running.park(sequence)
        self._preemption.costs = self.costs


def break_even(points: Sequence[Point]) -> float | None:
    """Tokens from which copying is cheaper, by straight lines; 0: always; None: never."""
    lengths = np.array([point.length for point in points], dtype=float)
    gain = np.array([point.recompute_seconds - point.swap_seconds for point in points])
    if len(points) < 2:
        return 0.0 if gain[0] > 0 else None
    slope, start = np.polyfit(lengths, gain, 1)
    if (gain > 0).all():
        return 0.0
    return None if slope <= 0 else max(float(-start / slope), 0.0)


def measure_preemption(llm: LLM, lengths: Sequence[int], repeat: int) -> list[Point]:
    """Preempt requests of each length on an idle engine with a host tier, where the longest fits both."""
    preempted = Preempted(llm)
    preempted.measure(min(lengths), 1)  # first steps are slower
    return [preempted.measure(length, repeat) for length in sorted(lengths)]


def preemption_table(points: Sequence[Point]) -> TextTable:
    """A line per length. Beside the seconds stands what the engine's cost model, which has seen the runs before,
    expected of each."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.2f}"

    rows = tuple(
        (
            f"{point.length:,}",
            (
                format_bytes(point.nbytes),
                ms(point.swap_seconds),
                ms(point.expected_swap),
                ms(point.recompute_seconds),
                ms(point.expected_recompute),
                f"{point.recompute_seconds / point.swap_seconds:.1f}",
            ),
        )
        for point in points
    )
    found = break_even(points)
    if found is None:
        note = "copying is never cheaper here"
    else:
        note = f"copying is cheaper {f'from {found:,.0f} tokens on' if found else 'at every length'}"
    columns = ("KVs", "swap ms", "expected", "recompute ms", "expected", "recompute / swap")
    return TextTable("One preemption by length", "tokens", columns, rows, (note,))
