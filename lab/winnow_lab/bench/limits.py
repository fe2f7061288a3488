"""Limits of the machine: reading memory, copying it, multiplying matrices."""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from winnow.report.provenance import Machine
from winnow_lab.bench.timing import Call, interleave

# Far beyond the last-level cache, so that what is read comes from memory.
_TIMES_CACHE = 8
_LEAST_BYTES = 256 * 2**20
_MATRIX_SIZES = (256, 1024, 2048, 4096, 8192)
# Torch multiplies 16-bit matrices a hundred times slower than float32 where the processor has no instructions for them.
_LONGEST_PRODUCT = 0.25  # seconds
_REPEATS = 7


@dataclass(frozen=True)
class Reading:
    """A call that reads memory as fast as it goes; timed in turn with others, it tells what they could reach."""

    run: Call
    num_bytes: int
    """Read by a call."""

    @classmethod
    def fastest(cls, device: torch.device) -> "Reading":
        """Return the fastest of several reductions over a buffer, which it keeps: machines differ in which is best."""
        buffer = _buffer(device)
        calls: list[Call] = [buffer.sum, buffer.amax, buffer.view(torch.int64).sum]
        return max((cls(call, buffer.nbytes) for call in calls), key=lambda each: each.rate(device))

    def rate(self, device: torch.device) -> float:
        """Return bytes per second, the median of some calls."""
        return _rate(self.run, self.num_bytes, device)


@dataclass(frozen=True)
class Limits:
    """Measured with all of torch's threads; bytes and operations per second."""

    read: float
    """Rate of the fastest of several reductions over a buffer."""
    copy: float
    """Bytes read and bytes written together."""
    matmul: float
    """Floating-point operations of a matrix product, a multiplication and an addition counted as two.

    In the type or in float32, whichever is faster.
    """

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
