"""The cache as the executor holds it: memory, and tables that say where each row lies."""

from dataclasses import dataclass, field

import torch

from winnow.cache.accounting.host_ledger import HostTierError
from winnow.cache.accounting.ledger import Ledger
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import CacheLayout
from winnow.cache.pool import KVPool
from winnow.cache.slot_states import SlotStates
from winnow.cache.tables import BlockTables
from winnow.cache.tiers.host_tier import HostTier
from winnow.cache.update import BlockCopies, CacheUpdate, CopyDiscarded, RowsRestored, RowsSaved
from winnow.cache.wide import WideWindow, WideWindows
from winnow.errors import describe_error


@dataclass(frozen=True)
class PagedCache:
    """Cache that an attention backend reads and writes."""

    pool: KVPool
    tables: BlockTables
    host: HostTier | None = None
    """None: no update saves anything."""
    wide: WideWindows | None = None
    """Windows that are kept in 16 bits beside narrow KVs; None: there are none."""
    states: SlotStates = field(default_factory=SlotStates)
    """Everything of sequences that is no block."""

    @classmethod
    def allocate(
        cls, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu", host_bytes: int = 0
    ) -> "PagedCache":
        """Take the memory; that of the host tier, at most `host_bytes`, is taken as it is used."""
        pool = KVPool(layout, size.by_kind, device)
        wide = WideWindows(layout, size, device) if layout.wide.any else None
        states = SlotStates([] if wide is None else [wide])
        return cls(pool, BlockTables(layout, size, device), HostTier(pool, host_bytes), wide, states)

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes + self.tables.nbytes + (0 if self.wide is None else self.wide.total_bytes)

    @property
    def windows(self) -> tuple[WideWindow, ...]:
        """The windows of `wide`, each of some of the layers."""
        return () if self.wide is None else self.wide.windows

    def window(self, layer: int) -> WideWindow | None:
        """Return the window of wide KVs of a layer; None: it has none."""
        return None if self.wide is None else self.wide.of_layer(layer)

    def apply(self, update: CacheUpdate) -> None:
        """Apply a ledger's update: copies of states and blocks, also to and from the host tier, then tables and
        lengths.

        Raises:
            HostTierError: copies to or from the host tier failed; all else is done.
        """
        failed = self.states.follow(update)
        for copies in update.copies:
            if isinstance(copies, BlockCopies):
                device = self.pool.device
                self.pool.copy_blocks(
                    torch.from_numpy(copies.source).to(device), torch.from_numpy(copies.target).to(device)
                )
            elif isinstance(copies, RowsSaved | RowsRestored | CopyDiscarded):
                assert self.host is not None, "without a host tier nothing is saved"
                try:
                    self.host.apply(copies)
                except (KeyError, MemoryError, RuntimeError) as error:
                    failed.setdefault(copies.host_id, describe_error(error))
        self.tables.apply(update)
        if failed:
            raise HostTierError(failed, next(iter(failed.values())))


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
        """Apply the ledger's changes to memory and tables."""
        self.paged.apply(self.ledger.take_update())
