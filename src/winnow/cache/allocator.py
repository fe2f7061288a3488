"""Which blocks of the pool are free, and how many holders each of the others has: host arithmetic."""

from collections.abc import Callable

import numpy as np

from winnow.cache.layout import IntArray


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class BlockAllocator:
    """A stack of free block ids, and a count of holders per block.

    Taking or returning n blocks is one slice and one scatter, O(n): no loop over blocks, no scan of the pool. A block
    that only the prefix index holds counts as free, and is taken back from there when the stack does not suffice.

    Attributes:
        holders: int32 [num_blocks], how many table entries name each block, and the index.
        indexed: bool [num_blocks], whether the index is one of the holders.
        num_cached: blocks that only the index holds.
        reclaim: called with a number of blocks, frees at least as many of them; set by the index.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The tail of the stack is handed out first, in ascending runs: neighbours in the pool read faster.
        self._stack = np.arange(num_blocks, dtype=np.int32)
        self._num_stacked = num_blocks
        self.holders = np.zeros(num_blocks, dtype=np.int32)
        self.indexed = np.zeros(num_blocks, dtype=np.bool_)
        self.num_cached = 0
        self._num_indexed = 0
        self.reclaim: Callable[[int], None] = lambda num_blocks: None

    @property
    def num_free(self) -> int:
        """Blocks that can be had."""
        return self._num_stacked + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes + self.holders.nbytes + self.indexed.nbytes

    def allocate(self, n: int) -> IntArray:
        """Take n blocks, each with one holder. Returns their ids, int32 [n].

        Raises:
            OutOfBlocksError: fewer than n are free; nothing is taken.
        """
        if n > self.num_free:
            raise OutOfBlocksError(f"{n} blocks asked for, {self.num_free} of {self.num_blocks} free")
        if n > self._num_stacked:
            self.reclaim(n - self._num_stacked)
        blocks = self._stack[self._num_stacked - n : self._num_stacked].copy()
        self._num_stacked -= n
        self.holders[blocks] = 1
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Add one holder to each of `blocks`, int32 [n], distinct and in use."""
        self.num_cached -= self._num_cached_of(blocks)
        self.holders[blocks] += 1

    def release(self, blocks: IntArray) -> None:
        """Take one holder from each of `blocks`, int32 [n], distinct; those without a holder become free."""
        self.holders[blocks] -= 1
        self.num_cached += self._num_cached_of(blocks)
        self._push(blocks[self.holders[blocks] == 0])

    def index(self, blocks: IntArray) -> None:
        """The index holds `blocks`, int32 [n], in use and not indexed, from now on."""
        self.indexed[blocks] = True
        self.holders[blocks] += 1
        self._num_indexed += len(blocks)

    def unindex(self, blocks: IntArray) -> int:
        """The index no longer holds `blocks`. Returns how many of them are on the stack now."""
        self.num_cached -= self._num_cached_of(blocks)
        self.indexed[blocks] = False
        self._num_indexed -= len(blocks)
        self.holders[blocks] -= 1
        freed = blocks[self.holders[blocks] == 0]
        self._push(freed)
        return len(freed)

    def check_integrity(self, holders: IntArray) -> None:
        """Assert that every block is either free or counted once per holder.

        `holders`, int64 [num_blocks]: how many table entries name each block.
        """
        free = self._stack[: self._num_stacked]
        assert len(np.unique(free)) == self._num_stacked, "a block is free twice"
        assert (self.holders[free] == 0).all(), "a free block has a holder"
        held = holders + self.indexed
        assert np.array_equal(self.holders, held), "counts of holders differ from the tables"
        assert self._num_stacked + int((held > 0).sum()) == self.num_blocks, (
            "a block is neither free nor held"
        )
        assert self.num_cached == int((self.indexed & (holders == 0)).sum()), "cached blocks are miscounted"

    def _num_cached_of(self, blocks: IntArray) -> int:
        if not self._num_indexed:
            return 0
        return int((self.indexed[blocks] & (self.holders[blocks] == 1)).sum())

    def _push(self, freed: IntArray) -> None:
        self._stack[self._num_stacked : self._num_stacked + len(freed)] = freed
        self._num_stacked += len(freed)
