"""Allocation of the pool's blocks: those that are free, and the others' numbers of holders; host arithmetic."""

from collections.abc import Callable, Sequence

import numpy as np

from winnow.cache.layout import IntArray
from winnow.cache.row_groups import BlockCount


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class _FreeStack:
    """A stack of the free ones among the blocks first, ..., first + total - 1.

    The first `withheld` of all are not on it, since memory for them is not granted yet.
    """

    def __init__(self, first: int, total: int) -> None:
        self.first, self.total = first, total
        self.ids = np.arange(first, first + total, dtype=np.int32)
        self.count = total
        self.withheld = 0

    def pop(self, n: int) -> IntArray:
        # The tail is handed out first, in ascending runs: neighbours in the pool read faster.
        self.count -= n
        return self.ids[self.count : self.count + n].copy()

    def push(self, freed: IntArray) -> None:
        self.ids[self.count : self.count + len(freed)] = freed
        self.count += len(freed)


class BlockAllocator:
    """Stacks of free block ids, one for each kind of blocks, and a count of holders per block.

    Taking or returning n blocks is one slice and one scatter, O(n): no loop over blocks, no scan of the pool. A block
    that only the prefix index holds counts as free, and is taken back from there when the stack does not suffice.

    Each kind can run short alone. Memory of one may have to be granted first (`withhold`, `supply`): until it is
    refused it counts as free.

    Args:
        count: blocks of each kind; ids of the first kind come first.

    Attributes:
        holders: int32 [num_blocks], how many table entries name each block, and the index.
        indexed: bool [num_blocks], whether the index is one of the holders.
        cached: blocks that only the index holds.
        reclaim: called with a condition, frees blocks that only the index holds until it is true; set by the index.
        refusal: why memory for blocks was refused the last time; None: it was not.
    """

    def __init__(self, count: Sequence[int]) -> None:
        ends = np.cumsum(count)
        self._stacks = [_FreeStack(int(end) - n, n) for n, end in zip(count, ends, strict=True)]
        self._firsts = ends[:-1]  # of the second kind and those after it
        self.num_blocks = int(ends[-1])
        self.holders = np.zeros(self.num_blocks, dtype=np.int32)
        self.indexed = np.zeros(self.num_blocks, dtype=np.bool_)
        self.cached = BlockCount([0] * len(self._stacks))
        self._num_indexed = 0
        self.reclaim: Callable[[Callable[[], bool]], None] = lambda enough: None
        self.refusal: str | None = None

    # -- memory that is granted later ----------------------------------------------------------------------------

    def withhold(self, kind: int) -> None:
        """Hand out blocks of a kind only after `supply`. Called before any is taken."""
        stack = self._stacks[kind]
        assert stack.count == stack.total, "no block of the kind is in use"
        stack.withheld, stack.count = stack.total, 0

    def wanted(self, kind: int, ahead: int) -> range:
        """Return the withheld blocks to be granted so that `ahead` can be had, counted from the first of the kind."""
        stack = self._stacks[kind]
        lacking = min(max(ahead - stack.count - self.cached[kind], 0), stack.withheld)
        return range(stack.withheld - lacking, stack.withheld)

    def supply(self, kind: int, first: int) -> None:
        """Hand out the withheld blocks from `first` on, counted from the first of the kind: memory was granted."""
        stack = self._stacks[kind]
        stack.push(np.arange(stack.first + first, stack.first + stack.withheld, dtype=np.int32))
        stack.withheld = first

    # -- how many ------------------------------------------------------------------------------------------------

    @property
    def free(self) -> BlockCount:
        """Blocks that can be had, at once or when their memory is granted."""
        stacks = zip(self._stacks, self.cached, strict=True)
        return BlockCount(
            stack.count + cached + (0 if self.refusal else stack.withheld) for stack, cached in stacks
        )

    @property
    def held(self) -> BlockCount:
        stacks = zip(self._stacks, self.cached, strict=True)
        return BlockCount(stack.total - stack.withheld - stack.count - cached for stack, cached in stacks)

    @property
    def num_free(self) -> int:
        """Free blocks for sequences that take all kinds in proportion, as the scarcest kind limits them."""
        if len(self._stacks) == 1:
            return self._stacks[0].count + self.cached[0]
        kinds = zip(self.free, self._stacks, strict=True)
        return min(count * self.num_blocks // stack.total for count, stack in kinds if stack.total)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def nbytes(self) -> int:
        stacks = sum(stack.ids.nbytes for stack in self._stacks)
        return stacks + self.holders.nbytes + self.indexed.nbytes

    def has(self, count: BlockCount) -> bool:
        """Return whether this number of each kind is free and not withheld."""
        stacks = zip(self._stacks, self.cached, strict=True)
        return count.fits(stack.count + cached for stack, cached in stacks)

    def count(self, blocks: IntArray) -> BlockCount:
        if len(self._stacks) == 1:
            return BlockCount((len(blocks),))
        return BlockCount(np.bincount(self.kind_of(blocks), minlength=len(self._stacks)).tolist())

    def kind_of(self, blocks: IntArray) -> IntArray:
        """Return the kind of each of `blocks`, int32 [n]: int64 [n]."""
        return np.searchsorted(self._firsts, blocks, side="right")

    # -- taking and returning ------------------------------------------------------------------------------------

    def allocate(self, n: int, kinds: IntArray | None = None) -> IntArray:
        """Take n blocks, each with one holder, of `kinds`, int64 [n]; None: all of the first. Returns ids, int32 [n].

        Raises OutOfBlocksError: fewer than that are free; nothing is taken.
        """
        wanted = BlockCount((n,))
        if kinds is not None:
            wanted = BlockCount(np.bincount(kinds, minlength=len(self._stacks)).tolist())
        if not self.has(wanted):
            raise OutOfBlocksError(
                f"{' and '.join(map(str, wanted))} blocks asked for, {' and '.join(map(str, self.free))} free"
            )

        def enough() -> bool:
            return wanted.fits(stack.count for stack in self._stacks)

        if not enough():
            self.reclaim(enough)
        if kinds is None:
            blocks = self._stacks[0].pop(n)
        else:
            blocks = np.empty(n, dtype=np.int32)
            for kind, stack in enumerate(self._stacks):
                blocks[kinds == kind] = stack.pop(wanted[kind])
        self.holders[blocks] = 1
        return blocks

    def allocate_like(self, blocks: IntArray) -> IntArray:
        return self.allocate(len(blocks), self.kind_of(blocks) if len(self._stacks) > 1 else None)

    def share(self, blocks: IntArray) -> None:
        """Add one holder to each of `blocks`, int32 [n], distinct and in use."""
        self._count_cached(blocks, -1)
        self.holders[blocks] += 1

    def release(self, blocks: IntArray) -> None:
        """Take one holder from each of `blocks`, int32 [n], distinct; those without a holder become free."""
        self.holders[blocks] -= 1
        self._count_cached(blocks, 1)
        self._push(blocks[self.holders[blocks] == 0])

    def index(self, blocks: IntArray) -> None:
        """Record the index as a holder of `blocks`, int32 [n], which are in use and not indexed."""
        self.indexed[blocks] = True
        self.holders[blocks] += 1
        self._num_indexed += len(blocks)

    def unindex(self, blocks: IntArray) -> None:
        self._count_cached(blocks, -1)
        self.indexed[blocks] = False
        self._num_indexed -= len(blocks)
        self.holders[blocks] -= 1
        self._push(blocks[self.holders[blocks] == 0])

    def check_integrity(self, holders: IntArray) -> None:
        """Assert that every block is free or counted once per holder; holders: table entries of each, [num_blocks]."""
        stacks = [stack.ids[: stack.count] for stack in self._stacks]
        free = np.concatenate(stacks)
        assert len(np.unique(free)) == len(free), "a block is free twice"
        for kind, ids in enumerate(stacks):
            assert (self.kind_of(ids) == kind).all(), "a block is free as another kind"
        assert (self.holders[free] == 0).all(), "a free block has a holder"
        held = holders + self.indexed
        withheld = sum(stack.withheld for stack in self._stacks)
        assert np.array_equal(self.holders, held), "counts of holders differ from the tables"
        assert len(free) + int((held > 0).sum()) + withheld == self.num_blocks, (
            "a block is neither free nor held"
        )
        cached = np.flatnonzero(self.indexed & (holders == 0)).astype(np.int32)
        assert self.cached == self.count(cached), "cached blocks are miscounted"

    # -- inside --------------------------------------------------------------------------------------------------

    def _count_cached(self, blocks: IntArray, sign: int) -> None:
        """Count those of `blocks` that only the index holds as cached, or (-1) no longer."""
        if self._num_indexed:
            count = self.count(blocks[self.indexed[blocks] & (self.holders[blocks] == 1)])
            self.cached = self.cached.plus(count) if sign > 0 else self.cached.minus(count)

    def _push(self, freed: IntArray) -> None:
        if len(self._stacks) == 1:
            self._stacks[0].push(freed)
            return
        kinds = self.kind_of(freed)
        for kind, stack in enumerate(self._stacks):
            stack.push(freed[kinds == kind])
