"""Blocks with more than one holder: who may hold any, and copies before one is written to."""

from collections.abc import Iterable

import numpy as np

from winnow.cache.accounting.row_tables import RowTables
from winnow.cache.layout import IntArray
from winnow.cache.row_groups import BlockCount
from winnow.cache.update import BlockCopies


class SharedBlocks:
    """Copy-on-write for the rows of sequences."""

    def __init__(self, rows: RowTables) -> None:
        self._rows = rows
        # Slots that took part in a fork. The first kind may hold blocks with other holders; the second kind may
        # have such a block at the tail of a row, where the next KV would be written.
        self.slots: set[int] = set()
        self._shared_tail: set[int] = set()

    def add(self, slot: int) -> None:
        """Add a sequence that holds full blocks with others."""
        self.slots.add(slot)

    def add_with_tail(self, slot: int) -> None:
        """Add a sequence that holds blocks with others, the partly filled ones included."""
        self.slots.add(slot)
        self._shared_tail.add(slot)

    def discard(self, slot: int) -> None:
        self.slots.discard(slot)
        self._shared_tail.discard(slot)

    def is_shared(self, slot: int) -> bool:
        if slot in self.slots and not len(self._shared_blocks(slot)):
            self.discard(slot)
        return slot in self.slots

    def can_own(self, slot: int) -> bool:
        allocator = self._rows.allocator
        return slot not in self.slots or allocator.has(allocator.count(self._shared_blocks(slot)))

    def own(self, slot: int) -> None:
        """Replace all blocks of a sequence that have other holders by copies. Raises OutOfBlocksError: `can_own` is
        False; nothing has changed."""
        if slot in self.slots:
            self._copy(slot, np.zeros_like(self._rows.lengths[slot]))
            self.discard(slot)

    def own_front(self, slot: int, lengths: IntArray) -> bool:
        """Make a sequence that is about to be cut to `lengths` KVs, [layers, heads], the only holder of what it keeps.

        Returns False, with nothing changed, where there are no blocks for copies.
        """
        if slot not in self.slots:
            return True
        num_blocks, allocator = self._rows.layout.row_blocks(lengths), self._rows.allocator
        front = np.zeros_like(num_blocks), num_blocks
        if not allocator.has(allocator.count(self._shared(slot, *front))):
            return False
        self._copy(slot, *front)
        return True

    def tails(self, slots: Iterable[int]) -> BlockCount:
        """Return what copies of the partly filled last blocks of some sequences take that have other holders."""
        count = BlockCount()
        for slot in self._shared_tail.intersection(slots):
            count = count.plus(self._rows.allocator.count(self._shared(slot, *self._tail_range(slot))))
        return count

    def own_tails(self, slots: Iterable[int]) -> None:
        for slot in self._shared_tail.intersection(slots):
            self._shared_tail.discard(slot)
            self._copy(slot, self._tail_range(slot)[0])

    # -- inside --------------------------------------------------------------------------------------------------

    def _shared_blocks(self, slot: int) -> IntArray:
        num_blocks = self._rows.layout.row_blocks(self._rows.lengths[slot])
        return self._shared(slot, np.zeros_like(num_blocks), num_blocks)

    def _shared(self, slot: int, first: IntArray, last: IntArray) -> IntArray:
        """Return those of the entries first <= j < last of each row, [layers, heads], that have other holders."""
        blocks = self._rows.blocks([slot], first[None], last[None])
        shared: IntArray = blocks[self._rows.allocator.holders[blocks] > 1]
        return shared

    def _tail_range(self, slot: int) -> tuple[IntArray, IntArray]:
        """Return the entry of the partly filled last block of each row, half-open; empty where it is full."""
        lengths, layout = self._rows.lengths[slot], self._rows.layout
        return lengths // layout.block_size, layout.row_blocks(lengths)

    def _copy(self, slot: int, first: IntArray, last: IntArray | None = None) -> None:
        """Replace the shared ones among the blocks from `first`, [layers, heads], up to `last` by copies; None: all."""
        rows, allocator = self._rows, self._rows.allocator
        last = rows.num_blocks(slot) if last is None else last
        index = rows.pages.index(np.array([slot], dtype=np.int64), first[None], last[None])
        blocks = rows.pages.entries.reshape(-1)[index]
        shared = allocator.holders[blocks] > 1
        source = blocks[shared]
        if not len(source):
            return
        target = allocator.allocate_like(source)
        rows.enter(index[shared], target)
        allocator.release(source)
        rows.changes.copies.append(BlockCopies(source, target))
        rows.count_peak()
