"""Rows of sequences: their lengths, and the blocks that stand in their tables."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from winnow.cache.accounting.allocator import BlockAllocator
from winnow.cache.accounting.table_pages import TablePages
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import CacheLayout, IntArray
from winnow.cache.row_groups import BlockCount
from winnow.cache.update import PendingUpdate, RowLengths


class Demand(NamedTuple):
    """Blocks and pages that appending would take, at most."""

    by_kind: BlockCount = BlockCount()
    pages: int = 0

    @property
    def blocks(self) -> int:
        return self.by_kind.total

    def plus(self, other: "Demand") -> "Demand":
        return Demand(self.by_kind.plus(other.by_kind), self.pages + other.pages)


class Growth(NamedTuple):
    """Blocks and pages until rows of some sequences are longer."""

    slots: IntArray  # int64 [B]
    lengths: IntArray  # of each row afterwards, int32 [B, layers, heads]
    have: IntArray  # blocks of each row before, int32 [B, layers, heads]
    want: IntArray  # and afterwards
    pages: IntArray  # that each sequence lacks, int64 [B]
    demand: Demand


class RowTables:
    """Lengths and tables of the rows of all sequences, and a record of their changes.

    Attributes:
        lengths: int32 [max_num_seqs, layers, heads], KVs of each row.
        reserved: int32 [max_num_seqs], blocks that each row has at least.
        pages: the block tables.
        changes: what the next update says.
        peak_blocks: most blocks that were in use at a time; peak_bytes: most bytes of the device that they took.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, allocator: BlockAllocator) -> None:
        self.layout = layout
        self.allocator = allocator
        self.pages = TablePages(layout, size)
        self.changes = PendingUpdate()
        self.lengths = np.zeros((size.max_num_seqs, layout.num_layers, layout.num_kv_heads), dtype=np.int32)
        self.reserved = np.zeros(size.max_num_seqs, dtype=np.int32)
        self.peak_blocks = self.peak_bytes = 0

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self.lengths.nbytes + self.reserved.nbytes

    # -- what rows hold ------------------------------------------------------------------------------------------

    def num_blocks(self, slot: int) -> IntArray:
        """Return of each row of a sequence, reserved ones included, [layers, heads]."""
        return self.num_blocks_of(np.array([slot]), self.lengths[[slot]])[0]

    def num_blocks_of(self, slots: IntArray, lengths: IntArray) -> IntArray:
        """Return of each row of sequences, [B, layers, heads], if it has `lengths` KVs, reserved ones included."""
        num_blocks: IntArray = np.maximum(self.layout.row_blocks(lengths), self._reserved_blocks(slots))
        return num_blocks

    def blocks_of(self, slot: int) -> IntArray:
        """Return the ids of the blocks that hold KVs of a sequence, int32 [n], row by row."""
        num_blocks = self.layout.row_blocks(self.lengths[slot])
        return self.blocks([slot], np.zeros_like(num_blocks)[None], num_blocks[None])

    def blocks(self, slots: Iterable[int], first: IntArray, last: IntArray) -> IntArray:
        """Return what stands in the entries first <= j < last of each row, int32 [n]."""
        index = self.pages.index(np.fromiter(slots, dtype=np.int64), first, last)
        found: IntArray = self.pages.entries.reshape(-1)[index]
        return found

    def filled_slots(self, num_blocks: int) -> IntArray:
        """Return the slots of each of the cache's blocks that hold KVs of sequences, [num_blocks]."""
        slots = np.flatnonzero(self.lengths.any(axis=(1, 2)))
        held = self.layout.row_blocks(self.lengths[slots])
        counts = held.ravel()
        entry = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        left = np.repeat(self.lengths[slots].ravel(), counts) - entry * self.layout.block_size
        filled = np.zeros(num_blocks, dtype=np.int64)
        blocks = self.blocks(slots.tolist(), np.zeros_like(held), held)
        np.maximum.at(filled, blocks, np.minimum(left, self.layout.block_size))
        return filled

    def check_integrity(self, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Assert what must hold of the rows of open sequences. Returns the holder and the id of each block held."""
        num_blocks = self.num_blocks_of(slots, self.lengths[slots])
        blocks = self.blocks(slots.tolist(), np.zeros_like(num_blocks), num_blocks)
        kinds = self.layout.kinds_of(num_blocks)
        assert kinds is None or np.array_equal(self.allocator.kind_of(blocks), kinds), (
            "a row holds a block of another kind"
        )
        assert not self.lengths[:, ~self.layout.has_row].any(), "a row that does not exist has a length"
        owners: IntArray = np.repeat(slots, num_blocks.sum(axis=(1, 2)))
        holdings, times = np.unique(np.stack([owners, blocks]), axis=1, return_counts=True)
        assert (times == 1).all(), f"slot {holdings[0][times > 1][0]} holds a block twice"
        return owners, blocks

    # -- changes -------------------------------------------------------------------------------------------------

    def enter(self, index: IntArray, blocks: IntArray) -> None:
        """Write `blocks` to the table entries at an index of `TablePages.index`."""
        self.pages.entries.reshape(-1)[index] = blocks
        self.changes.entries.append(index)

    def set_lengths(self, slots: IntArray, lengths: IntArray) -> None:
        """Set the lengths of the rows of sequences, [B, layers, heads]."""
        self.lengths[slots] = lengths
        self.changes.lengths.append(RowLengths(slots, lengths))

    def count_peak(self) -> None:
        """Update the peak after blocks were taken."""
        held = self.allocator.held
        self.peak_blocks = max(self.peak_blocks, held.total)
        self.peak_bytes = max(self.peak_bytes, self.layout.device_bytes(held))

    def has_room_for(self, demand: Demand) -> bool:
        return self.allocator.has(demand.by_kind) and demand.pages <= self.pages.num_free

    def growth(self, slots: IntArray, lengths: IntArray, at_least: int = 0) -> Growth:
        """Return the blocks and pages needed to grow rows to `lengths` KVs and at least `at_least` blocks each."""
        reserved = self._reserved_blocks(slots)
        have = np.maximum(self.layout.row_blocks(self.lengths[slots]), reserved)
        want = np.maximum(self.layout.row_blocks(lengths), reserved)
        if at_least:
            want = np.maximum(want, at_least * self.layout.has_row)
        pages = self.pages.missing(slots, want.max(axis=(1, 2)))
        demand = Demand(self.layout.by_kind(want - have), int(pages.sum()))
        return Growth(slots, lengths, have, want, pages, demand)

    def grow(self, growth: Growth) -> None:
        """Take the blocks and pages that rows lack, for which there is room, and enter them into the tables."""
        if growth.demand.pages:
            self.changes.paged.update(self.pages.grow(growth.slots, growth.pages))
        if growth.demand.blocks:
            index = self.pages.index(growth.slots, growth.have, growth.want)
            kinds = self.layout.kinds_of(growth.want - growth.have)
            self.enter(index, self.allocator.allocate(growth.demand.blocks, kinds))
        self.set_lengths(growth.slots, growth.lengths)
        self.count_peak()

    def has_pages_for(self, slot: int, lengths: IntArray) -> bool:
        """Return whether a sequence finds table pages for rows of `lengths` KVs, [layers, heads]."""
        return self.growth(np.array([slot]), lengths[None]).demand.pages <= self.pages.num_free

    def hold(self, slot: int, lengths: IntArray, blocks: IntArray) -> None:
        """Enter `blocks` in the rows of an empty sequence, which their reference counts already include.

        Args:
            lengths: KVs of its rows, int32 [layers, heads].
        """
        growth = self.growth(np.array([slot], dtype=np.int64), lengths[None])
        self.changes.paged.update(self.pages.grow(growth.slots, growth.pages))
        num_blocks = self.layout.row_blocks(growth.lengths)
        self.enter(self.pages.index(growth.slots, np.zeros_like(num_blocks), num_blocks), blocks)
        self.set_lengths(growth.slots, growth.lengths.copy())
        self.count_peak()

    def drop_front(self, slot: int, num_blocks: IntArray) -> None:
        """Take `num_blocks`, [layers], off the front of the rows of a sequence. Those behind take their place."""
        held, slots = self.num_blocks(slot), np.array([slot], dtype=np.int64)
        dropped = num_blocks[:, None] * self.layout.has_row
        left = np.where(dropped > 0, held - dropped, 0)
        none = np.zeros_like(held)
        released = self.blocks([slot], none[None], dropped[None])
        moved = self.blocks([slot], dropped[None], (dropped + left)[None])
        self.enter(self.pages.index(slots, none[None], left[None]), moved)
        self.allocator.release(released)
        lengths = self.lengths[slots] - (dropped * self.layout.block_size).astype(np.int32)
        self.set_lengths(slots, lengths)
        self.pages.trim(slot, int(self.num_blocks(slot).max()))

    def clear(self, slot: int) -> None:
        """Empty a sequence: its blocks lose a holder, its pages are free, nothing is reserved."""
        num_blocks = self.num_blocks(slot)[None]
        self.allocator.release(self.blocks([slot], np.zeros_like(num_blocks), num_blocks))
        self.pages.trim(slot, 0)
        self.reserved[slot] = 0
        emptied = np.array([slot], dtype=np.int64)
        self.set_lengths(emptied, np.zeros_like(self.lengths[emptied]))

    def _reserved_blocks(self, slots: IntArray) -> IntArray:
        """Return blocks that each row has at least, int32 [B, layers, heads], or what broadcasts to it."""
        reserved: IntArray = self.reserved[slots, None, None]
        return reserved * self.layout.has_row if reserved.any() else reserved
