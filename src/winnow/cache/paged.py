"""The cache as the executor holds it: memory, and tables that say where each row lies."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.cache.host_ledger import HostTierError
from winnow.cache.host_tier import HostTier
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, CacheSize
from winnow.cache.ledger import Ledger
from winnow.cache.pool import KVPool
from winnow.cache.tables import BlockTables
from winnow.cache.update import BlockCopies, CacheUpdate
from winnow.cache.wide import WideWindow, open_windows
from winnow.errors import describe_error


@dataclass(frozen=True)
class PagedCache:
    """What an attention backend reads and writes."""

    pool: KVPool
    tables: BlockTables
    host: HostTier | None = None
    """None: no update saves anything."""
    windows: tuple[WideWindow, ...] = ()
    """What is kept in 16 bits beside narrow KVs, for some of the layers each."""

    @classmethod
    def allocate(
        cls, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu", host_bytes: int = 0
    ) -> "PagedCache":
        """Take the memory; that of the host tier, at most `host_bytes`, is taken as it is used."""
        pool = KVPool(layout, size.num_blocks, device, size.num_far_blocks)
        tables, windows = BlockTables(layout, size, device), open_windows(layout, size, device)
        return cls(pool, tables, HostTier(pool, host_bytes), windows)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes + self.tables.nbytes + sum(window.nbytes for window in self.windows)

    def window(self, layer: int) -> WideWindow | None:
        """What is kept wide of a layer's KVs."""
        return next((window for window in self.windows if layer in window.layers), None)

    def fork(self, slot: int, to: int) -> None:
        """Follow a sequence that was forked to another slot, beyond what updates say."""
        for window in self.windows:
            window.fork(slot, to)

    def apply(self, update: CacheUpdate) -> None:
        """Follow a ledger: copy blocks, also to and from the host tier, then take over its tables and lengths.

        Raises:
            HostTierError: copies to or from the host tier failed; all else is done.
        """
        for window in self.windows:
            for slot in update.closed:
                window.clear(slot)
        failed: dict[int, str] = {}
        for copies in update.copies:
            if isinstance(copies, BlockCopies):
                device = self.pool.device
                self.pool.copy_blocks(
                    torch.from_numpy(copies.source).to(device), torch.from_numpy(copies.target).to(device)
                )
                continue
            assert self.host is not None, "without a host tier nothing is saved"
            try:
                self.host.apply(copies)
            except (KeyError, MemoryError, RuntimeError) as error:
                failed.setdefault(copies.host_id, describe_error(error))
        cut = self._cut_tails(update)
        self.tables.apply(update)
        if len(cut):
            slot, layer, head, index = torch.from_numpy(cut).to(self.pool.device).T
            page = self.tables.page_table[slot, index // PAGE_ENTRIES]
            self.pool.moved(self.tables.pages[page, layer, head, index % PAGE_ENTRIES].long())
        if failed:
            raise HostTierError(failed, next(iter(failed.values())))

    def _cut_tails(self, update: CacheUpdate) -> NDArray[np.int64]:
        """Blocks of which KVs were cut off, whose keys are summarised: slot, layer, head, entry, int64 [n, 4]."""
        if self.pool.summaries is None:
            return np.empty((0, 4), dtype=np.int64)
        size, lengths, found = self.pool.layout.block_size, self.tables.host_lengths.copy(), []
        for each in update.lengths:
            fewer = lengths[each.slots] - each.lengths
            index, layer, head = np.nonzero((fewer > 0) & (fewer % size > 0))  # not where whole blocks went
            entry = each.lengths[index, layer, head] // size
            found.append(np.stack([each.slots[index], layer, head, entry], axis=1).astype(np.int64))
            lengths[each.slots] = each.lengths
        return np.concatenate(found) if found else np.empty((0, 4), dtype=np.int64)


class LocalCache:
    """A ledger and the memory that follows it, in one place: for use without a scheduler and an executor."""

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu") -> None:
        self.ledger = Ledger(layout, size)
        self.paged = PagedCache.allocate(layout, size, device)

    def append(self, slots: list[int], counts: list[int]) -> None:
        """See `Ledger.append`; there is room to write afterwards."""
        self.ledger.append(slots, counts)
        self.sync()

    def sync(self) -> None:
        """Let memory and tables follow what was done to the ledger."""
        self.paged.apply(self.ledger.take_update())
