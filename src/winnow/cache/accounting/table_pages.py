"""The ledger's side of the block tables: pages of entries, and whose they are."""

import numpy as np

from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, IntArray, ceil_div


class TablePages:
    """Pages of block ids; `winnow.cache.tables` says why there are two levels.

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
        """Give each sequence `missing` further pages; both [B]. The caller has checked `num_free`.

        Returns:
            The slots that got any.
        """
        growing = slots[missing > 0].tolist()
        for slot, count in zip(growing, missing[missing > 0].tolist(), strict=True):
            start, end = int(self._num_pages[slot]), int(self._num_pages[slot]) + count
            self.page_table[slot, start:end] = [self._free_pages.pop() for _ in range(count)]
            self._num_pages[slot] = end
        return growing

    def trim(self, slot: int, num_blocks: int) -> None:
        """Take back the pages that a sequence of `num_blocks` blocks in its longest row does not need."""
        needed = ceil_div(num_blocks, PAGE_ENTRIES)
        self._free_pages.extend(self.of(slot)[needed:].tolist())
        self._num_pages[slot] = min(needed, int(self._num_pages[slot]))

    def of(self, slot: int) -> IntArray:
        """Return the pages of a sequence, in order."""
        return self.page_table[slot, : self._num_pages[slot]]

    def index(self, slots: IntArray, first: IntArray, last: IntArray) -> IntArray:
        """Return where the entries first <= j < last of each row lie in the flattened `entries`, int64 [n], row by row.

        Args:
            slots: int64 [B].
            first: [B, layers, heads]; last: likewise.
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
        """Assert that every page is free or owned by one sequence."""
        owned = [page for slot in range(len(self._num_pages)) for page in self.of(slot).tolist()]
        assert sorted(owned + self._free_pages) == list(range(len(self.entries))), (
            "a page is lost or owned twice"
        )
