"""Which blocks of the pool are free, and how many holders each of the others has: host arithmetic."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from winnow.cache.layout import BlockCount, IntArray
from winnow.errors import describe_error


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. The scheduler asks first, so a user never sees this."""


class _FreeStack:
    """A stack of the free ones among the blocks first, ..., first + total - 1."""

    def __init__(self, first: int, total: int) -> None:
        self.total = total
        self.ids = np.arange(first, first + total, dtype=np.int32)
        self.count = total

    def pop(self, n: int) -> IntArray:
        # The tail is handed out first, in ascending runs: neighbours in the pool read faster.
        self.count -= n
        return self.ids[self.count : self.count + n].copy()

    def push(self, freed: IntArray) -> None:
        self.ids[self.count : self.count + len(freed)] = freed
        self.count += len(freed)


class BlockAllocator:
    """Stacks of free block ids, and a count of holders per block.

    Taking or returning n blocks is one slice and one scatter, O(n): no loop over blocks, no scan of the pool. A block
    that only the prefix index holds counts as free, and is taken back from there when the stack does not suffice.

    Where values of some layers lie on a tier, the last `num_far` blocks serve the rows of these layers, and the others
    the rest; each kind can run short alone. Memory of far ones may have to be asked for first (`withhold`): what is
    refused counts as used until it is granted.

    Attributes:
        first_far: the first block whose values lie on a tier; `num_blocks` if none do.
        holders: int32 [num_blocks], how many table entries name each block, and the index.
        indexed: bool [num_blocks], whether the index is one of the holders.
        reclaim: called with a condition, frees blocks that only the index holds until it is true; set by the index.
        refusal: why memory for values was refused the last time; None: it was not.
    """

    def __init__(self, num_blocks: int, num_far: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first_far = num_blocks - num_far
        self._near, self._far = _FreeStack(0, self.first_far), _FreeStack(self.first_far, num_far)
        self.holders = np.zeros(num_blocks, dtype=np.int32)
        self.indexed = np.zeros(num_blocks, dtype=np.bool_)
        self._cached = BlockCount()
        self._num_indexed = 0
        self.reclaim: Callable[[Callable[[], bool]], None] = lambda enough: None
        self.refusal: str | None = None
        self._withheld = 0  # the first of the far ones
        self._grant: Callable[[int, int], None] = lambda first, end: None
        self._grant_size = 1

    def withhold(self, grant: Callable[[int, int], None], size: int) -> None:
        """Hand far blocks out only after memory for them was granted. Called before any is taken.

        Args:
            grant: makes the values of blocks first <= block < end writable, counted from the first far one. Raises
                MemoryError or OSError where there is no room.
            size: blocks that it is asked for at a time.
        """
        assert self._far.count == self._far.total, "no far block is in use"
        self._withheld, self._far.count = self._far.total, 0
        self._grant, self._grant_size = grant, size

    def retry(self) -> None:
        """Count memory that was refused as free, until it is asked for again."""
        self.refusal = None

    # -- how many ------------------------------------------------------------------------------------------------

    @property
    def free(self) -> BlockCount:
        """Blocks that can be had."""
        withheld = 0 if self.refusal else self._withheld
        return BlockCount(self._near.count + self._cached.near, self._far.count + self._cached.far + withheld)

    @property
    def held(self) -> BlockCount:
        """Blocks that sequences hold."""
        far = self._far.total - self._withheld - self._far.count - self._cached.far
        return BlockCount(self._near.total - self._near.count - self._cached.near, far)

    @property
    def cached(self) -> BlockCount:
        """Blocks that only the index holds."""
        return self._cached

    @property
    def num_free(self) -> int:
        """Blocks that can be had by sequences whose layers take them in proportion: by the kind that is shortest."""
        free = self.free
        if not self._far.total:
            return free.near
        kinds = ((free.near, self._near.total), (free.far, self._far.total))
        return min(count * self.num_blocks // total for count, total in kinds if total)

    @property
    def num_used(self) -> int:
        """The others."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return self._cached.total

    @property
    def nbytes(self) -> int:
        stacks = self._near.ids.nbytes + self._far.ids.nbytes
        return stacks + self.holders.nbytes + self.indexed.nbytes

    def has(self, count: BlockCount) -> bool:
        """Whether the asked number of each kind can be had; those withheld are asked for where needed."""
        lacking = count.far - self._far.count - self._cached.far
        if lacking > 0 and self._withheld:
            self._ask_for(lacking)
        free = self.free
        return count.near <= free.near and count.far <= free.far

    def count(self, blocks: IntArray) -> BlockCount:
        """How many of `blocks`, int32 [n], are of each kind."""
        far = int((blocks >= self.first_far).sum()) if self._far.total else 0
        return BlockCount(len(blocks) - far, far)

    # -- taking and returning ------------------------------------------------------------------------------------

    def allocate(self, n: int, far: NDArray[np.bool_] | None = None) -> IntArray:
        """Take n blocks, each with one holder. Returns their ids, int32 [n].

        Args:
            far: bool [n], which of them are for rows whose values lie on a tier; None: none.

        Raises:
            OutOfBlocksError: fewer than that are free; nothing is taken.
        """
        num_far = 0 if far is None else int(far.sum())
        wanted = BlockCount(n - num_far, num_far)
        if not self.has(wanted):
            kinds = f"{wanted.near} near and {wanted.far} far " if self._far.total else f"{n} "
            raise OutOfBlocksError(f"{kinds}blocks asked for, {self.free} of {self.num_blocks} free")
        if wanted.near > self._near.count or wanted.far > self._far.count:
            self.reclaim(lambda: wanted.near <= self._near.count and wanted.far <= self._far.count)
        if far is None:
            blocks = self._near.pop(n)
        else:
            blocks = np.empty(n, dtype=np.int32)
            blocks[~far], blocks[far] = self._near.pop(wanted.near), self._far.pop(wanted.far)
        self.holders[blocks] = 1
        return blocks

    def allocate_like(self, blocks: IntArray) -> IntArray:
        """Take as many blocks as `blocks`, int32 [n], each of the same kind; as `allocate`."""
        return self.allocate(len(blocks), blocks >= self.first_far if self._far.total else None)

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
        """The index holds `blocks`, int32 [n], in use and not indexed, from now on."""
        self.indexed[blocks] = True
        self.holders[blocks] += 1
        self._num_indexed += len(blocks)

    def unindex(self, blocks: IntArray) -> None:
        """The index no longer holds `blocks`."""
        self._count_cached(blocks, -1)
        self.indexed[blocks] = False
        self._num_indexed -= len(blocks)
        self.holders[blocks] -= 1
        self._push(blocks[self.holders[blocks] == 0])

    def check_integrity(self, holders: IntArray) -> None:
        """Assert that every block is either free or counted once per holder.

        `holders`, int64 [num_blocks]: how many table entries name each block.
        """
        near, far = (stack.ids[: stack.count] for stack in (self._near, self._far))
        free = np.concatenate([near, far])
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert (near < self.first_far).all() and (far >= self.first_far).all(), (
            "a block is free as another kind"
        )
        assert (self.holders[free] == 0).all(), "a free block has a holder"
        held = holders + self.indexed
        assert np.array_equal(self.holders, held), "counts of holders differ from the tables"
        assert len(free) + int((held > 0).sum()) + self._withheld == self.num_blocks, (
            "a block is neither free nor held"
        )
        cached = np.flatnonzero(self.indexed & (holders == 0)).astype(np.int32)
        assert self._cached == self.count(cached), "cached blocks are miscounted"

    # -- inside --------------------------------------------------------------------------------------------------

    def _ask_for(self, count: int) -> None:
        """Ask for memory of at least `count` far blocks that are withheld, as far as there are any."""
        while count > 0 and self._withheld:
            end, first = self._withheld, max(self._withheld - self._grant_size, 0)
            try:
                self._grant(first, end)
            except (MemoryError, OSError) as error:
                self.refusal = describe_error(error)
                return
            self.refusal = None
            self._far.push(np.arange(self.first_far + first, self.first_far + end, dtype=np.int32))
            self._withheld, count = first, count - (end - first)

    def _count_cached(self, blocks: IntArray, sign: int) -> None:
        """Those of `blocks` that only the index holds become cached, or (-1) are no longer."""
        if self._num_indexed:
            near, far = self.count(blocks[self.indexed[blocks] & (self.holders[blocks] == 1)])
            self._cached = BlockCount(self._cached.near + sign * near, self._cached.far + sign * far)

    def _push(self, freed: IntArray) -> None:
        if not self._far.total:
            self._near.push(freed)
            return
        far = freed >= self.first_far
        self._near.push(freed[~far])
        self._far.push(freed[far])
