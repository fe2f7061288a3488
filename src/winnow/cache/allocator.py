"""Which blocks of the pool are free, and how many holders each of the others has: host arithmetic."""

import numpy as np

from winnow.cache.layout import IntArray


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class BlockAllocator:
    """A stack of free block ids, and a count of holders per block.

    Taking or returning n blocks is one slice and one scatter, O(n): no loop over blocks, no scan of the pool.

    Attributes:
        num_free: blocks without a holder.
        holders: int32 [num_blocks], how many table entries name each block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # The tail of the stack is handed out first, in ascending runs: neighbours in the pool read faster.
        self._stack = np.arange(num_blocks, dtype=np.int32)
        self.holders = np.zeros(num_blocks, dtype=np.int32)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes + self.holders.nbytes

    def allocate(self, n: int) -> IntArray:
        """Take n blocks, each with one holder. Returns their ids, int32 [n].

        Raises:
            OutOfBlocksError: fewer than n are free; nothing is taken.
        """
        if n > self.num_free:
            raise OutOfBlocksError(f"{n} blocks asked for, {self.num_free} of {self.num_blocks} free")
        blocks = self._stack[self.num_free - n : self.num_free].copy()
        self.num_free -= n
        self.holders[blocks] = 1
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Add one holder to each of `blocks`, int32 [n], distinct and in use."""
        self.holders[blocks] += 1

    def release(self, blocks: IntArray) -> None:
        """Take one holder from each of `blocks`, int32 [n], distinct; those without a holder become free."""
        self.holders[blocks] -= 1
        freed = blocks[self.holders[blocks] == 0]
        self._stack[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def check_integrity(self, holders: IntArray) -> None:
        """Assert that every block is either free or counted once per holder.

        `holders`, int64 [num_blocks]: how many table entries name each block.
        """
        free = self._stack[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a block is free twice"
        assert (self.holders[free] == 0).all(), "a free block has a holder"
        assert np.array_equal(self.holders, holders), "counts of holders differ from the tables"
        assert self.num_free + int((holders > 0).sum()) == self.num_blocks, "a block is neither free nor held"
