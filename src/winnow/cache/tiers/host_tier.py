"""Copies of sequences in host memory: whole blocks, byte by byte, whatever the codec."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from winnow.cache.block_bytes import BlockPart
from winnow.cache.codec import round_up
from winnow.cache.layout import IntArray
from winnow.cache.pool import KVPool
from winnow.cache.row_groups import BlockCount
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
    """

    def __init__(self, pool: KVPool, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._pool = pool
        self._copies: dict[int, Tensor] = {}

    @property
    def host_ids(self) -> set[int]:
        return set(self._copies)

    def apply(self, change: RowsSaved | RowsRestored | CopyDiscarded) -> None:
        match change:
            case RowsSaved():
                self.save(change.host_id, change.blocks)
            case RowsRestored():
                self.load(change.host_id, change.blocks)
            case CopyDiscarded():
                self.discard(change.host_id)

    def save(self, host_id: int, blocks: IntArray) -> None:
        """Copy blocks, int32 [n], with positions and accumulators. Raises MemoryError, RuntimeError: memory lacks;
        nothing has changed."""
        nbytes = self._nbytes(blocks)
        if self.nbytes + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes asked for, {self.nbytes} of {self.limit} in use")
        self._copies[host_id] = self.read(blocks)
        self.nbytes += nbytes

    def load(self, host_id: int, blocks: IntArray) -> None:
        """Fill blocks, int32 [n], from a copy, in the order in which it was saved. The copy stays. Raises KeyError:
        there is no such copy; RuntimeError: memory lacks, and the blocks may be half written."""
        self.write(blocks, self._copies[host_id])

    def read(self, blocks: IntArray) -> Tensor:
        """Return all that blocks, int32 [n], hold: uint8 [`CacheLayout.host_bytes`], in host memory of the caller's.
        Raises MemoryError, RuntimeError: memory lacks."""
        pinned = self._pool.device.type == "cuda"
        copy = torch.empty(self._nbytes(blocks), dtype=torch.uint8, pin_memory=pinned)
        for part, there, index in self._pieces(copy, blocks):
            part.read(index, there)
        return copy

    def write(self, blocks: IntArray, copy: Tensor) -> None:
        """Fill blocks, int32 [n], with what `read` returned for as many. Raises RuntimeError: memory lacks; the blocks
        may be half written."""
        for part, there, index in self._pieces(copy, blocks):
            part.write(index, there)

    def discard(self, host_id: int) -> None:
        copy = self._copies.pop(host_id, None)
        if copy is not None:
            self.nbytes -= copy.nbytes

    def time_copies(self, clock: Callable[[], float]) -> tuple[int, float, float]:
        """Copy some blocks out and back, which leaves them as they are. Returns bytes copied each way, and seconds:
        out, and back. 0 bytes if the limit is below a block."""
        layout = self._pool.layout
        most = min(self.limit, _MEASURED_BYTES) // (layout.block_bytes + 8)
        blocks = np.arange(min(self._pool.num_blocks, most), dtype=np.int32)
        while self._nbytes(blocks) > self.limit:  # blocks of some kinds are larger than others
            blocks = blocks[: len(blocks) // 2]
        out = back = 0.0
        for _ in range(2):  # the first time, memory is touched that was never used
            start = clock()
            self.save(_MEASURING, blocks)
            saved = clock()
            self.load(_MEASURING, blocks)
            out, back = saved - start, clock() - saved
            self.discard(_MEASURING)
        return self._nbytes(blocks), out, back

    def _nbytes(self, blocks: IntArray) -> int:
        count = BlockCount(int(kind.covers(torch.from_numpy(blocks)).sum()) for kind in self._pool.kinds)
        return self._pool.layout.host_bytes(count)

    def _pieces(self, copy: Tensor, blocks: IntArray) -> Iterator[tuple[BlockPart, Tensor, Tensor]]:
        """Return parts of the pool; where `copy` has some of their blocks, [m, n]; and at which index, int64 [m].

        What aligns a part in `copy` is set to 0, so that equal blocks give equal bytes.
        """
        start, layout = 0, self._pool.layout
        everything = torch.from_numpy(blocks).to(self._pool.device, torch.int64)
        for kind, mask in self._pool.split(everything):
            index = kind.local(everything[mask])
            for part, size in zip(kind.parts, kind.kind.part_bytes(layout.num_accumulators), strict=True):
                end = start + len(index) * size
                there = copy[start:end].view(part.dtype).view(len(index), part.width)
                start = round_up(end, 8)
                copy[end:start] = 0
                step = len(index) if part.device.type == "cpu" else _STAGING_BYTES // size
                for first in range(0, len(index), max(step, 1)):
                    yield part, there[first : first + step], index[first : first + step]
