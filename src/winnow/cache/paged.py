"""The cache as the executor holds it: memory, and tables that say where each row lies."""

from dataclasses import dataclass

import torch

from winnow.cache.layout import CacheLayout, CacheSize
from winnow.cache.ledger import Ledger
from winnow.cache.pool import KVPool
from winnow.cache.tables import BlockTables
from winnow.cache.update import CacheUpdate
from winnow.cache.wide import WideWindow, open_windows


@dataclass(frozen=True)
class PagedCache:
    """What an attention backend reads and writes."""

    pool: KVPool
    tables: BlockTables
    windows: tuple[WideWindow, ...] = ()
    """What is kept in 16 bits beside narrow KVs, for some of the layers each."""

    @classmethod
    def allocate(
        cls, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu"
    ) -> "PagedCache":
        """Take the memory."""
        return cls(
            KVPool(layout, size.num_blocks, device),
            BlockTables(layout, size, device),
            open_windows(layout, size, device),
        )

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
        """Follow a ledger: copy blocks, then take over its tables and lengths."""
        for window in self.windows:
            for slot in update.closed:
                window.clear(slot)
        for copies in update.copies:
            device = self.pool.position.device
            self.pool.copy_blocks(
                torch.from_numpy(copies.source).to(device), torch.from_numpy(copies.target).to(device)
            )
        self.tables.apply(update)


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
