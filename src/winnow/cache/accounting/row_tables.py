"""Rows of sequences: their lengths, and the blocks that stand in their tables."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from winnow.cache.accounting.allocator import BlockAllocator
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, IntArray, ceil_div
from winnow.cache.row_groups import BlockCount
from winnow.cache.update import (
    CacheUpdate,
    Copy,
    CopyDiscarded,
    RowLengths,
    RowsRestored,
    StateDiscarded,
    StateRestored,
)


class TablePages:
    """Pages of block ids; `winnow.cache.paged` says why there are two levels.

    Attributes:
        entries: int32 [num_pages, layers, heads, PAGE_ENTRIES]; those past a row's length mean nothing.
        page_table: int32 [max_num_seqs, pages_per_seq].
    """

    def __init__(self, layout: CacheLayout, size: CacheSize) -> None:
        self._num_rows = layout.num_layers * layout.num_kv_heads
        # Memory that is never touched is never taken from the system.
        self.entries = np.zeros(
            (size.num_pages, layout.num_layers, layout.num_kv_heads, PAGE_ENTRIES), dtype=np.int32
        )
        self.page_table = np.zeros((size.max_num_seqs, size.pages_per_seq), dtype=np.int32)
        self._num_pages = np.zeros(size.max_num_seqs, dtype=np.int64)
        self._free_pages = list(range(size.num_pages))

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.page_table.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free_pages)

    def missing(self, slots: IntArray, num_blocks: IntArray) -> IntArray:
        """Return pages each sequence lacks to hold `num_blocks` blocks in its longest row; both [B]."""
        return np.maximum(-(-num_blocks // PAGE_ENTRIES) - self._num_pages[slots], 0)

    def grow(self, slots: IntArray, missing: IntArray) -> list[int]:
        """Give each sequence `missing` further pages; both [B]. The caller has checked `num_free`. Returns the slots
        that got any."""
        growing = slots[missing > 0].tolist()
        for slot, count in zip(growing, missing[missing > 0].tolist(), strict=True):
            start, end = int(self._num_pages[slot]), int(self._num_pages[slot]) + count
            self.page_table[slot, start:end] = [self._free_pages.pop() for _ in range(count)]
            self._num_pages[slot] = end
        return growing

    def trim(self, slot: int, num_blocks: int) -> None:
        needed = ceil_div(num_blocks, PAGE_ENTRIES)
        self._free_pages.extend(self.of(slot)[needed:].tolist())
        self._num_pages[slot] = min(needed, int(self._num_pages[slot]))

    def of(self, slot: int) -> IntArray:
        return self.page_table[slot, : self._num_pages[slot]]

    def index(self, slots: IntArray, first: IntArray, last: IntArray) -> IntArray:
        """Return where the entries first <= j < last of each row, [B, layers, heads], lie in the flattened `entries`.

        Slots are int64 [B], the result int64 [n], row by row.
        """
        counts = (last - first).ravel()
        rows = np.repeat(np.arange(counts.size), counts)
        blocks = np.arange(rows.size) + np.repeat(first.ravel() - (np.cumsum(counts) - counts), counts)
        sequences = rows // self._num_rows
        page = self.page_table[slots[sequences], blocks // PAGE_ENTRIES].astype(np.int64)
        row = rows - sequences * self._num_rows
        index: IntArray = (page * self._num_rows + row) * PAGE_ENTRIES + blocks % PAGE_ENTRIES
        return index

    def check_integrity(self) -> None:
        owned = [page for slot in range(len(self._num_pages)) for page in self.of(slot).tolist()]
        pages = list(range(len(self.entries)))
        assert sorted(owned + self._free_pages) == pages, "a page is lost or owned twice"


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


class PendingUpdate:
    """Builder of the next `CacheUpdate` while a ledger changes; `paged` are slots whose table pages changed."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.copies: list[Copy] = []
        self.entries: list[IntArray] = []
        self.paged: set[int] = set()
        self.lengths: list[RowLengths] = []
        self._last = CacheUpdate()

    def restores(self, slot: int) -> bool:
        return any(isinstance(each, RowsRestored) and each.slot == slot for each in self.copies)

    def close(self, slot: int) -> None:
        """Record that the sequence of a slot has ended. Pending restores to the slot are dropped."""
        restored = RowsRestored, StateRestored
        self.copies = [c for c in self.copies if not (isinstance(c, restored) and c.slot == slot)]
        self.closed.append(slot)

    def take(self, pages: TablePages) -> CacheUpdate:
        entries = np.concatenate(self.entries) if self.entries else np.empty(0, dtype=np.int64)
        update = CacheUpdate(
            closed=tuple(self.closed),
            copies=tuple(self.copies),
            # An index may stand here twice; what it names is read now, so both say the same.
            entries=entries,
            blocks=pages.entries.reshape(-1)[entries],
            pages=tuple((slot, tuple(pages.of(slot).tolist())) for slot in sorted(self.paged)),
            lengths=tuple(self.lengths),
        )
        self.closed, self.copies, self.entries, self.lengths = [], [], [], []
        self.paged = set()
        self._last = update
        return update

    def repeat(self) -> None:
        """Repeat the last update in the next one, without its copies of blocks."""
        last, self._last = self._last, CacheUpdate()
        self.closed[:0], self.lengths[:0] = last.closed, last.lengths
        self.copies[:0] = [c for c in last.copies if isinstance(c, CopyDiscarded | StateDiscarded)]
        self.entries.insert(0, last.entries)
        self.paged |= {slot for slot, _ in last.pages}


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
        """Return the blocks of each row of a sequence, reserved ones included, [layers, heads]."""
        return self.num_blocks_of(np.array([slot]), self.lengths[[slot]])[0]

    def num_blocks_of(self, slots: IntArray, lengths: IntArray) -> IntArray:
        """Return of each row of sequences, [B, layers, heads], if it has `lengths` KVs, reserved ones included."""
        num_blocks: IntArray = np.maximum(self.layout.row_blocks(lengths), self._reserved_blocks(slots))
        return num_blocks

    def blocks_of(self, slot: int) -> IntArray:
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
        self.lengths[slots] = lengths
        self.changes.lengths.append(RowLengths(slots, lengths))

    def count_peak(self) -> None:
        held = self.allocator.held
        self.peak_blocks = max(self.peak_blocks, held.total)
        self.peak_bytes = max(self.peak_bytes, self.layout.device_bytes(held))

    def has_room_for(self, demand: Demand) -> bool:
        return self.allocator.has(demand.by_kind) and demand.pages <= self.pages.num_free

    def growth(self, slots: IntArray, lengths: IntArray, at_least: int = 0) -> Growth:
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
        return self.growth(np.array([slot]), lengths[None]).demand.pages <= self.pages.num_free

    def hold(self, slot: int, lengths: IntArray, blocks: IntArray) -> None:
        """Enter `blocks` in rows of `lengths` KVs, int32 [layers, heads], of an empty sequence, a holder of them."""
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
        self.set_lengths(slots, self.lengths[slots] - (dropped * self.layout.block_size).astype(np.int32))
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
