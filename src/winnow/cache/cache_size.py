"""Numbers of blocks, pages and sequences that fit into a budget of bytes. Imports no torch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, ceil_div
from winnow.cache.row_groups import BlockCount
from winnow.errors import ConfigError
from winnow.values.units import format_bytes

# Assumed ratio of a sequence's longest row to its average row where heads compete for a budget.
ROW_SKEW = 8
_INT32 = 4


@dataclass(frozen=True)
class CacheSize:
    """The number of blocks, pages and sequences, from which all tensors of the cache follow."""

    num_blocks: int
    num_pages: int
    max_num_seqs: int
    pages_per_seq: int
    other_kinds: tuple[int, ...] = ()
    """Numbers of the last blocks, which are of the second kind and those after it."""

    @property
    def by_kind(self) -> BlockCount:
        return BlockCount((self.num_blocks - sum(self.other_kinds), *self.other_kinds))

    @classmethod
    def fit(
        cls,
        layout: CacheLayout,
        kv_memory: int,
        max_num_seqs: int,
        max_model_len: int,
        shares_prefixes: bool = False,
    ) -> "CacheSize":
        """Return the size of the largest cache within `kv_memory` bytes, tables and counters included.

        Without a prefix cache it has no more blocks than all sequences together can fill. Values on a tier take none
        of these bytes, and at most `ValueTier.size` there. Raises ConfigError: not even one sequence of one block per
        row fits.
        """
        limit = None if layout.value_tier is None else layout.value_tier.size

        def size(num_blocks: int) -> CacheSize:
            return cls.of_blocks(layout, num_blocks, max_num_seqs, max_model_len)

        def fits_tier(found: CacheSize) -> bool:
            return limit is None or layout.tier_bytes(found.by_kind) <= limit

        least_bytes = min(kind.device_bytes(layout.num_accumulators) for kind in layout.kinds)
        low, high = 0, kv_memory // least_bytes
        if not shares_prefixes:
            high = min(high, max_num_seqs * layout.blocks_for(max_model_len))
        while low < high:  # the largest count whose total fits; the total grows with the count
            middle = (low + high + 1) // 2
            found = size(middle)
            if found.nbytes(layout) <= kv_memory and fits_tier(found):
                low = middle
            else:
                high = middle - 1
        if low < layout.rows_per_seq:
            smallest = size(layout.rows_per_seq)
            name, least, got = "kv_memory", smallest.nbytes(layout), kv_memory
            if limit is not None and not fits_tier(smallest):
                name, least, got = "value_tier: size", layout.tier_bytes(smallest.by_kind), limit
            states = f" and {max_num_seqs} states (max_num_seqs)" * (layout.state_bytes > 0)
            raise ConfigError(
                f"{name} must be at least {format_bytes(least)} ({least} bytes) for one block in each of the "
                f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads{states}, got {format_bytes(got)}"
            )
        return size(low)

    @classmethod
    def of_blocks(cls, layout: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int) -> Self:
        """Return the size of a cache of `num_blocks` blocks with the table pages that they need.

        A sequence of b blocks per row takes at most b / PAGE_ENTRIES + 1 pages, so with equal rows blocks run out
        first. Rows that differ in length, or share blocks, may run out of pages earlier; the ledger counts both. Any
        request may bring a policy whose rows differ, so there are pages for rows ROW_SKEW times as long as the average
        (under 2 % of the memory), and always enough for one sequence alone, whose row takes at most all blocks.
        """
        pages_per_seq = layout.pages_for(max_model_len)
        num_pages = ROW_SKEW * ceil_div(num_blocks, layout.rows_per_seq * PAGE_ENTRIES)
        num_pages = max(num_pages, min(pages_per_seq, ceil_div(num_blocks, PAGE_ENTRIES))) + max_num_seqs
        num_pages = min(num_pages, max_num_seqs * pages_per_seq)
        shares = cls._shares(layout, num_blocks, max_num_seqs, max_model_len)
        ends = np.ceil(num_blocks * np.cumsum(shares) - 1e-6)
        others = tuple(int(end - first) for first, end in pairwise(ends))
        return cls(num_blocks, num_pages, max_num_seqs, pages_per_seq, others)

    @staticmethod
    def _shares(
        layout: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int
    ) -> NDArray[np.float64]:
        """Return the part of the blocks that each kind gets, float64 [kinds].

        A sequence of full length has its blocks first. What remains is split so that the length at which most of it
        lies idle leaves as little idle as can be: layers with a window take another part of a short sequence than of
        a long one, and a kind gets in proportion to the most that it is asked for by sequences of any one length,
        as many as all blocks together hold.
        """
        if len(layout.kinds) == 1:
            return np.ones(1)
        lengths = {max_model_len} | {1 << power for power in range((max_model_len - 1).bit_length())}
        wanted = {length: np.array(layout.by_kind(layout.row_blocks_seen(length))) for length in lengths}
        longest = wanted[max_model_len]
        if num_blocks <= longest.sum():
            return longest / longest.sum()
        most = np.max([min(max_num_seqs, num_blocks / each.sum()) * each for each in wanted.values()], axis=0)
        further = np.maximum(most - longest, 0)
        further = further if further.any() else longest
        found: NDArray[np.float64] = longest + further * (num_blocks - longest.sum()) / further.sum()
        return found / num_blocks

    def max_positions(self, layout: CacheLayout) -> int:
        return self.pages_per_seq * PAGE_ENTRIES * layout.block_size

    def prefix_state_bytes(self, layout: CacheLayout) -> int:
        """Return the bytes for states of prefixes: of all tokens that the blocks hold, or of all sequences."""
        tokens = self.num_blocks // layout.rows_per_seq * layout.block_size
        longest = self.max_positions(layout)
        count = max(self.max_num_seqs, tokens // longest)
        return count * layout.prefix_state_bytes(min(longest, ceil_div(tokens, count)))

    def nbytes(self, layout: CacheLayout) -> int:
        """Add up the bytes of the cache but those of a value tier: blocks, free stacks, counts of holders, table pages,
        page table, lengths, states."""
        rows = layout.num_layers * layout.num_kv_heads
        return (
            layout.device_bytes(self.by_kind)
            # free stacks, holders, and whether the prefix index is one of them
            + self.num_blocks * (2 * _INT32 + 1)
            # tables and lengths exist twice: the ledger's, and those on the compute device; lengths of these twice
            + 2 * self.num_pages * layout.page_bytes
            # and what each sequence has reserved
            + self.max_num_seqs * (2 * self.pages_per_seq + 3 * rows + 1) * _INT32
            + self.max_num_seqs * layout.prefix_state_bytes(self.max_positions(layout))
            + self.prefix_state_bytes(layout)
        )
