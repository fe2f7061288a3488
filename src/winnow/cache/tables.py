"""Tables of the blocks that a row holds, in order: the two-level block tables that attention reads.

A flat table [max_seqs, layers, heads, max_blocks] would cost 2 MiB per sequence at 32k tokens, 32 layers and 8 heads,
held by short sequences too. So entries live in pages: one page holds PAGE_ENTRIES entries of every row of one
sequence, and a sequence owns as many pages as its longest row needs. Nothing is copied when it grows.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, IntArray, ceil_div
from winnow.cache.update import CacheUpdate


class BlockTables:
    """Block tables and row lengths of a ledger on the compute device, changed by its updates and when rows are cut.

    Attributes:
        pages: int32 [num_pages, layers, heads, PAGE_ENTRIES]; entries past a row's length mean nothing.
        page_table: int32 [max_num_seqs, pages_per_seq].
        lengths: int32 [max_num_seqs, layers, heads], KVs of each row.
        host_lengths: the same as a numpy array; on a CPU it is the same memory.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu") -> None:
        rows = (layout.num_layers, layout.num_kv_heads)
        self.pages = torch.zeros((size.num_pages, *rows, PAGE_ENTRIES), dtype=torch.int32, device=device)
        self.page_table = torch.zeros(
            (size.max_num_seqs, size.pages_per_seq), dtype=torch.int32, device=device
        )
        self.host_lengths = np.zeros((size.max_num_seqs, *rows), dtype=np.int32)
        self.lengths = torch.from_numpy(self.host_lengths).to(device)

    @property
    def nbytes(self) -> int:
        # On a CPU lengths are one memory, counted as on any device: what fits does not depend on where.
        return self.pages.nbytes + self.page_table.nbytes + self.lengths.nbytes + self.host_lengths.nbytes

    @property
    def pages_per_seq(self) -> int:
        return self.page_table.shape[1]

    def apply(self, update: CacheUpdate) -> None:
        """Follow a ledger; the update's copies are made elsewhere."""
        if len(update.entries):
            self.pages.view(-1)[self._to_device(update.entries)] = self._to_device(update.blocks)
        for slot, pages in update.pages:
            self.page_table[slot, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for each in update.lengths:
            self.set_lengths(each.slots, each.lengths)

    def set_lengths(self, slots: IntArray, lengths: IntArray) -> None:
        """Set the KVs of each row, int32 [B, layers, heads], of the sequences in slots, int64 [B]."""
        self.host_lengths[slots] = lengths
        if self.lengths.device.type != "cpu":
            self.lengths[torch.from_numpy(slots)] = self._to_device(lengths)

    def longest(self, slots: list[int]) -> NDArray[np.int64]:
        """Return KVs in the longest row of each sequence, int64 [B]."""
        longest: NDArray[np.int64] = self.host_lengths[slots].max(axis=(1, 2)).astype(np.int64)
        return longest

    def lookup(self, slots: Tensor, layer: int, num_blocks: int) -> Tensor:
        """Return the first `num_blocks` entries of the rows of one layer.

        Args:
            slots: int64 [B], on the device of the tables.

        Returns:
            int32 [B, heads, num_blocks]; past a row's length the entries are arbitrary but valid block ids.
        """
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[:, layer][pages].transpose(1, 2).flatten(2)[:, :, :num_blocks]

    def lookup_layers(self, slots: Tensor, num_blocks: int) -> Tensor:
        """Look up as `lookup` does, all layers: int32 [layers, B, heads, num_blocks]."""
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[pages].permute(2, 0, 3, 1, 4).flatten(3)[..., :num_blocks]

    def _to_device(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(self.pages.device)
