"""The part of a cache that one rank of several holds: its heads of every layer, in blocks counted from its own first.

A ledger accounts for all ranks. What it says is cut for each of them here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.cache.accounting.ledger import Holdings
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, IntArray
from winnow.cache.update import BlockCopies, CacheUpdate, Copy, RowLengths, RowsRestored, RowsSaved

_VECTORS = 4
"""Dimensions of arrays that hold vectors of each head; others are the same on every rank."""


def join_states(parts: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {
        name: np.concatenate([part[name] for part in parts], axis=1) if array.ndim == _VECTORS else array
        for name, array in parts[0].items()
    }


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank. `layout` and `size` are those of the cache of all ranks together."""

    layout: CacheLayout
    size: CacheSize
    rank: int

    @property
    def kinds(self) -> range:
        each = len(self.layout.kinds) // self.layout.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    @property
    def first(self) -> int:
        return sum(self.size.by_kind[: self.kinds.start])

    @property
    def heads(self) -> slice:
        each = self.layout.of_rank.num_kv_heads
        return slice(self.rank * each, (self.rank + 1) * each)

    @property
    def own_size(self) -> CacheSize:
        count = self.size.by_kind[self.kinds.start : self.kinds.stop]
        return replace(self.size, num_blocks=sum(count), other_kinds=count[1:])

    def blocks(self, blocks: IntArray) -> IntArray:
        """Return the blocks of `blocks`, [n], that belong to the rank, counted from its first, in the same order."""
        own = blocks - self.first
        return own[(own >= 0) & (own < self.own_size.num_blocks)]

    def bytes_of(self, blocks: IntArray) -> slice:
        """Return the byte range of the rank's own among `blocks`, [n], in their host copy."""
        ends = np.cumsum(self.size.by_kind)
        count = np.bincount(np.searchsorted(ends, blocks, side="right"), minlength=len(ends)).tolist()
        start, stop = self.kinds.start, self.kinds.stop
        return slice(self.layout.host_bytes(count[:start]), self.layout.host_bytes(count[:stop]))

    def states(self, states: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the rank's part of the states of a prefix: vectors are [layers, heads, KVs, numbers]."""
        return {
            name: np.ascontiguousarray(array[:, self.heads]) if array.ndim == _VECTORS else array
            for name, array in states.items()
        }

    def holdings(self, held: Holdings) -> Holdings:
        return replace(
            held,
            lengths=held.lengths[:, :, self.heads],
            blocks={slot: self.blocks(blocks) for slot, blocks in held.blocks.items()},
        )

    def update(self, update: CacheUpdate) -> CacheUpdate:
        entries, mine = self._entries(update.entries)
        return replace(
            update,
            copies=tuple(self._copy(each) for each in update.copies),
            entries=entries,
            blocks=update.blocks[mine] - np.int32(self.first),
            lengths=tuple(
                RowLengths(each.slots, np.ascontiguousarray(each.lengths[:, :, self.heads]))
                for each in update.lengths
            ),
        )

    def _copy(self, copy: Copy) -> Copy:
        if isinstance(copy, BlockCopies):
            return BlockCopies(self.blocks(copy.source), self.blocks(copy.target))
        if isinstance(copy, RowsSaved | RowsRestored):
            return replace(copy, blocks=self.blocks(copy.blocks))
        return copy

    def _entries(self, entries: IntArray) -> tuple[IntArray, IntArray]:
        """Return indices into its own flattened pages, and which of `entries`, [n], they are: bool [n]."""
        heads, own = self.layout.num_kv_heads, self.heads
        row, entry = np.divmod(entries, PAGE_ENTRIES)
        layer, head = np.divmod(row, heads)
        mine = (head >= own.start) & (head < own.stop)
        index = (layer * (own.stop - own.start) + head - own.start) * PAGE_ENTRIES + entry
        return index[mine], mine
