"""What the machine can do at most: reading memory, copying it, multiplying matrices."""

import statistics
from dataclasses import dataclass

import torch

from winnow.bench.machine import Machine
from winnow.bench.timing import Call, interleave

# Far beyond the last-level cache, so that what is read comes from memory.
_TIMES_CACHE = 8
_LEAST_BYTES = 256 * 2**20
_MATRIX_SIZES = (1024, 2048)
_REPEATS = 7


@dataclass(frozen=True)
class Limits:
    """Measured with all of torch's threads; bytes and operations per second."""

    read: float
    """Of the fastest of several reductions over a buffer."""
    copy: float
    """Bytes read and bytes written together."""
    matmul: float
    """Floating-point operations of a matrix product, a multiplication and an addition counted as two."""

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> "Limits":
        """Takes about two seconds; `dtype` is that of the matrices."""
        num_bytes = max(_LEAST_BYTES, _TIMES_CACHE * Machine.here(device).last_level_cache)
        buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(buffer)
        # Which reduction comes nearest to the limit differs from machine to machine.
        readers: list[Call] = [buffer.sum, buffer.amax, buffer.view(torch.int64).sum]
        read = max(_rate(reader, buffer.nbytes, device) for reader in readers)
        copy = _rate(lambda: target.copy_(buffer), 2 * buffer.nbytes, device)
        matmul = max(_matmul_rate(size, dtype, device) for size in _MATRIX_SIZES)
        return cls(read, copy, matmul)


def _matmul_rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(lambda: a @ b, 2 * size**3, device)


def _rate(call: Call, amount: int, device: torch.device) -> float:
    [seconds] = interleave([call], _REPEATS, device)
    return amount / statistics.median(seconds)
