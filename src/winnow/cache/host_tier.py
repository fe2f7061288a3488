"""Copies of sequences in host memory: whole blocks, byte by byte, whatever the codec."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from winnow.cache.layout import IntArray, round_up
from winnow.cache.pool import KVPool
from winnow.cache.segment import BlockPart
from winnow.cache.update import CopyDiscarded, RowsRestored, RowsSaved

# Device memory through which blocks pass on their way, at most: they are gathered there, and cross in one piece.
_STAGING_BYTES = 64 * 2**20
_MEASURED_BYTES = 4 * 2**20
_MEASURING = -1


class HostTier:
    """Host memory that follows the ledger's updates, as the pool does. Pinned if the pool lies on a CUDA device.

    Memory is taken for each copy and returned with it. PyTorch keeps returned pinned memory for later copies.

    Args:
        limit: bytes that blocks may take; what else is kept of a sequence counts in the ledger alone.

    Attributes:
        nbytes: of all copies.
    """

    def __init__(self, pool: KVPool, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._pool = pool
        self._copies: dict[int, Tensor] = {}

    def __contains__(self, host_id: int) -> bool:
        return host_id in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def host_ids(self) -> set[int]:
        return set(self._copies)

    def apply(self, change: RowsSaved | RowsRestored | CopyDiscarded) -> None:
        """Follow the ledger. Raises as `save` and `load`."""
        match change:
            case RowsSaved():
                self.save(change.host_id, change.blocks)
            case RowsRestored():
                self.load(change.host_id, change.blocks)
            case CopyDiscarded():
                self.discard(change.host_id)

    def save(self, host_id: int, blocks: IntArray) -> None:
        """Copy blocks, int32 [n], with positions and accumulators.

        Raises:
            MemoryError, RuntimeError: memory lacks; nothing has changed.
        """
        nbytes = self._pool.layout.host_bytes(len(blocks))
        if self.nbytes + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes asked for, {self.nbytes} of {self.limit} in use")
        self._copies[host_id] = self.read(blocks)
        self.nbytes += nbytes

    def load(self, host_id: int, blocks: IntArray) -> None:
        """Copy what was saved to other blocks, int32 [n], in the same order. The copy stays.

        Raises:
            KeyError: there is no such copy.
            RuntimeError: memory lacks; the blocks may be half written.
        """
        self.write(blocks, self._copies[host_id])

    def read(self, blocks: IntArray) -> Tensor:
        """All that blocks, int32 [n], hold: uint8 [`CacheLayout.host_bytes` of n], in host memory of the caller's.

        Raises:
            MemoryError, RuntimeError: memory lacks.
        """
        layout, end = self._pool.layout, 0
        pinned = self._pool.device.type == "cuda"
        copy = torch.empty(layout.host_bytes(len(blocks)), dtype=torch.uint8, pin_memory=pinned)
        for size in layout.part_bytes:  # what aligns a part is 0, so that equal blocks give equal bytes
            end += round_up(len(blocks) * size, 8)
            copy[max(end - 8, 0) : end] = 0
        for part, there, index in self._pieces(copy, blocks):
            part.read(index, there)
        return copy

    def write(self, blocks: IntArray, copy: Tensor) -> None:
        """Fill blocks, int32 [n], with what `read` returned for as many.

        Raises:
            RuntimeError: memory lacks; the blocks may be half written.
        """
        for part, there, index in self._pieces(copy, blocks):
            part.write(index, there)
        self._pool.moved(torch.from_numpy(blocks).to(self._pool.device, torch.int64))

    def discard(self, host_id: int) -> None:
        """Return the memory of a copy; no effect if there is none."""
        copy = self._copies.pop(host_id, None)
        if copy is not None:
            self.nbytes -= copy.nbytes

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Copy some blocks out and back, which leaves them as they are.

        Returns:
            Bytes copied each way, and seconds: out, and back. 0 bytes if the limit is below a block.
        """
        layout = self._pool.layout
        most = min(self.limit, _MEASURED_BYTES) // (layout.block_bytes + 8)
        blocks = np.arange(min(self._pool.num_blocks, most), dtype=np.int32)
        out = back = 0.0
        for _ in range(2):  # the first time, memory is touched that was never used
            start = clock()
            self.save(_MEASURING, blocks)
            saved = clock()
            self.load(_MEASURING, blocks)
            out, back = saved - start, clock() - saved
            self.discard(_MEASURING)
        return layout.host_bytes(len(blocks)), out, back

    def _pieces(self, copy: Tensor, blocks: IntArray) -> Iterator[tuple[BlockPart, Tensor, Tensor]]:
        """Parts of the pool; where `copy` has some of its blocks, [m, n]; and which, int64 [m]."""
        index = torch.from_numpy(blocks).to(self._pool.device, torch.int64)
        start = 0
        for part, size in zip(self._pool.parts, self._pool.layout.part_bytes, strict=True):
            nbytes = len(blocks) * size
            there = copy[start : start + nbytes].view(part.dtype).view(len(blocks), part.width)
            start += round_up(nbytes, 8)
            step = len(blocks) if part.device.type == "cpu" else _STAGING_BYTES // size
            for first in range(0, len(blocks), max(step, 1)):
                yield part, there[first : first + step], index[first : first + step]
