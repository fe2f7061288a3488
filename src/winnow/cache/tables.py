"""Which blocks a row holds, in order: a two-level table that grows by demand.

A flat table [max_seqs, layers, heads, max_blocks] would cost 2 MiB per sequence at 32k tokens, 32 layers and 8 heads,
held by short sequences too. So entries live in pages: one page holds PAGE_ENTRIES entries of every row of one
sequence, and a sequence owns as many pages as its longest row needs. Nothing is copied when it grows.
"""

import numpy as np
import torch
from torch import Tensor

from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, CacheSize, IntArray, ceil_div


class BlockTables:
    """Pages of block ids.

    Attributes:
        pages: int32 [num_pages, layers, heads, PAGE_ENTRIES]; entries past a row's length mean nothing.
        page_table: int32 [max_num_seqs, pages_per_seq], on the compute device; `host_page_table` is its mirror.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu") -> None:
        self._rows = (layout.num_layers, layout.num_kv_heads)
        self.pages = torch.zeros(
            (size.num_pages, *self._rows, PAGE_ENTRIES), dtype=torch.int32, device=device
        )
        self.page_table = torch.zeros(
            (size.max_num_seqs, size.pages_per_seq), dtype=torch.int32, device=device
        )
        self.host_page_table = np.zeros((size.max_num_seqs, size.pages_per_seq), dtype=np.int32)
        self._num_pages = np.zeros(size.max_num_seqs, dtype=np.int64)
        self._free_pages = list(range(size.num_pages))

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self.page_table.nbytes + self.host_page_table.nbytes

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def pages_missing(self, slots: IntArray, num_blocks: IntArray) -> IntArray:
        """Pages each sequence lacks to hold `num_blocks` blocks in its longest row; both [B]."""
        return np.maximum(-(-num_blocks // PAGE_ENTRIES) - self._num_pages[slots], 0)

    def grow(self, slots: IntArray, missing: IntArray) -> None:
        """Give each sequence `missing` further pages; both [B]. The caller has checked `num_free_pages`."""
        for slot, count in zip(slots[missing > 0].tolist(), missing[missing > 0].tolist(), strict=True):
            start, end = int(self._num_pages[slot]), int(self._num_pages[slot]) + count
            self.host_page_table[slot, start:end] = [self._free_pages.pop() for _ in range(count)]
            self.page_table[slot, start:end] = torch.from_numpy(self.host_page_table[slot, start:end])
            self._num_pages[slot] = end

    def trim(self, slot: int, num_blocks: int) -> None:
        """Take back the pages that a sequence of `num_blocks` blocks in its longest row does not need."""
        needed = ceil_div(num_blocks, PAGE_ENTRIES)
        self._free_pages.extend(self.page_ids(slot)[needed:].tolist())
        self._num_pages[slot] = min(needed, int(self._num_pages[slot]))

    def page_ids(self, slot: int) -> IntArray:
        """The pages of a sequence, in order."""
        return self.host_page_table[slot, : self._num_pages[slot]]

    def copy(self, source: int, target: int) -> None:
        """Copy all entries of one sequence to another, which must hold as many pages."""
        self.pages[torch.from_numpy(self.page_ids(target))] = self.pages[
            torch.from_numpy(self.page_ids(source))
        ]

    def entry_index(self, slots: IntArray, rows: IntArray, blocks: IntArray) -> Tensor:
        """Where entry `blocks` of a row lies in the flattened `pages`, int64 [n]; all arguments [n].

        rows: layer * heads + head.
        """
        num_layers, num_heads = self._rows
        page = self.host_page_table[slots, blocks // PAGE_ENTRIES].astype(np.int64)
        index = (page * (num_layers * num_heads) + rows) * PAGE_ENTRIES + blocks % PAGE_ENTRIES
        return torch.from_numpy(index).to(self.pages.device)

    def lookup(self, slots: Tensor, layer: int, num_blocks: int) -> Tensor:
        """The first `num_blocks` entries of the rows of one layer.

        Args:
            slots: int64 [B], on the device of the tables.

        Returns:
            int32 [B, heads, num_blocks]; past a row's length the entries are arbitrary but valid block ids.
        """
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[:, layer][pages].transpose(1, 2).flatten(2)[:, :, :num_blocks]

    def lookup_layers(self, slots: Tensor, num_blocks: int) -> Tensor:
        """As `lookup`, of all layers: int32 [layers, B, heads, num_blocks]."""
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[pages].permute(2, 0, 3, 1, 4).flatten(3)[..., :num_blocks]

    def check_integrity(self) -> None:
        """Assert that every page is free or owned by one sequence."""
        owned = [page for slot in range(len(self._num_pages)) for page in self.page_ids(slot).tolist()]
        assert sorted(owned + self._free_pages) == list(range(len(self.pages))), (
            "a page is lost or owned twice"
        )
        assert np.array_equal(self.page_table.cpu().numpy(), self.host_page_table), (
            "page table differs from mirror"
        )
