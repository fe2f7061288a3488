"""Limits of the machine: reading memory, copying it, multiplying matrices; durations, with rivals measured in turn."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from winnow.report.provenance import Machine

Call = Callable[[], object]

# Far beyond the last-level cache, so that what is read comes from memory.
_TIMES_CACHE = 8
_LEAST_BYTES = 256 * 2**20
_MATRIX_SIZES = (256, 1024, 2048, 4096, 8192)
# Torch multiplies 16-bit matrices a hundred times slower than float32 where the processor has no instructions for them.
_LONGEST_PRODUCT = 0.25  # seconds
_REPEATS = 7


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds that `call` takes, its work on the device included."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):  # events are recorded on the current device's stream
            torch.cuda.synchronize()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(calls: Sequence[Call], repeats: int, device: torch.device) -> list[list[float]]:
    """Seconds of each call, `repeats` times each: [calls][repeats].

    All warm up once. Then every round times each call once, in turn: a machine that slows down, slows all of them.
    """
    for call in calls:
        call()
    rounds = [[seconds_of(call, device) for call in calls] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


@dataclass(frozen=True)
class Reading:
    """A call that reads memory as fast as it goes; timed in turn with others, it tells what they could reach."""

    run: Call
    num_bytes: int

    @classmethod
    def fastest(cls, device: torch.device) -> "Reading":
        """Return the fastest of several reductions over a buffer, which it keeps: machines differ in which is best."""
        buffer = _buffer(device)
        calls: list[Call] = [buffer.sum, buffer.amax, buffer.view(torch.int64).sum]
        return max((cls(call, buffer.nbytes) for call in calls), key=lambda each: each.rate(device))

    def rate(self, device: torch.device) -> float:
        return _rate(self.run, self.num_bytes, device)


@dataclass(frozen=True)
class Limits:
    """Measured with all of torch's threads; bytes and operations per second.

    Attributes:
        read: rate of the fastest of several reductions over a buffer.
        copy: bytes read and bytes written together.
        matmul: floating-point operations of a matrix product, a multiplication and an addition counted as two; in the
            type or in float32, whichever is faster.
    """

    read: float
    copy: float
    matmul: float

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> "Limits":
        """Measure the limits, which takes a few seconds; `dtype` is that of the matrices."""
        read = Reading.fastest(device).rate(device)
        source = _buffer(device)
        copy = _rate(partial(torch.empty_like(source).copy_, source), 2 * source.nbytes, device)
        matmul = max(_matmul_rate(each, device) for each in {dtype, torch.float32})
        return cls(read, copy, matmul)


def _buffer(device: torch.device) -> torch.Tensor:
    num_bytes = max(_LEAST_BYTES, _TIMES_CACHE * Machine.here(device).last_level_cache)
    return torch.ones(num_bytes // 4, dtype=torch.float32, device=device)


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the rate of the best size, the larger ones left out where they would take long."""
    best = 0.0
    for size in _MATRIX_SIZES:
        operations = 2 * size**3
        if best and operations / best > _LONGEST_PRODUCT:
            break
        a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
        best = max(best, _rate(partial(torch.mm, a, b), operations, device))
    return best


def _rate(call: Call, amount: int, device: torch.device) -> float:
    [seconds] = interleave([call], _REPEATS, device)
    return amount / statistics.median(seconds)
