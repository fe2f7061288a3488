"""The cache as the executor holds it: memory, and tables that say where each row lies."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.accounting.host_ledger import HostTierError
from winnow.cache.accounting.ledger import Ledger
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import PAGE_ENTRIES, CacheLayout, IntArray, ceil_div
from winnow.cache.pool import KVPool
from winnow.cache.slot_states import SlotStates
from winnow.cache.tiers.host_tier import HostTier
from winnow.cache.update import BlockCopies, CacheUpdate, CopyDiscarded, RowsPlaced, RowsRestored, RowsSaved
from winnow.cache.wide import WideWindow
from winnow.errors import describe_error


class BlockTables:
    """Block tables and row lengths of a ledger on the compute device, changed by its updates and when rows are cut.

    A flat table [max_seqs, layers, heads, max_blocks] would cost 2 MiB per sequence at 32k tokens, 32 layers and 8
    heads, held by short sequences too. So a page holds PAGE_ENTRIES entries of every row of one sequence, which owns as
    many pages as its longest row needs. Nothing is copied when it grows.

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
        longest: NDArray[np.int64] = self.host_lengths[slots].max(axis=(1, 2)).astype(np.int64)
        return longest

    def lookup(self, slots: Tensor, layer: int, num_blocks: int) -> Tensor:
        """Return the first entries of rows of one layer, int32 [B, heads, num_blocks]: past a length, any valid block.

        Slots are int64 [B], on the device of the tables.
        """
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[:, layer][pages].transpose(1, 2).flatten(2)[:, :, :num_blocks]

    def lookup_layers(self, slots: Tensor, num_blocks: int) -> Tensor:
        pages = self.page_table[slots, : ceil_div(num_blocks, PAGE_ENTRIES)]
        return self.pages[pages].permute(2, 0, 3, 1, 4).flatten(3)[..., :num_blocks]

    def _to_device(self, numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(self.pages.device)


class KeyRotation(Protocol):
    """Rotates the keys of a layer by a difference of positions."""

    def turn(self, layer: int, keys: Tensor, difference: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PagedCache:
    """Cache that an attention backend reads and writes."""

    pool: KVPool
    tables: BlockTables
    host: HostTier | None = None  # None: no update saves anything
    windows: tuple[WideWindow, ...] = ()  # what is kept in 16 bits beside narrow KVs
    states: SlotStates = field(default_factory=SlotStates)  # everything of sequences that is no block
    rotation: KeyRotation | None = None  # None: keys stay at their positions

    @classmethod
    def allocate(
        cls, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu", host_bytes: int = 0
    ) -> "PagedCache":
        """Take the memory; that of the host tier, at most `host_bytes`, is taken as it is used."""
        pool = KVPool(layout, size.by_kind, device)
        wide = tuple(
            WideWindow(layout, size.max_num_seqs, number, window, device)
            for number, window in enumerate(layout.wide_windows(size.max_positions(layout)))
        )
        tables = BlockTables(layout, size, device)
        return cls(pool, tables, HostTier(pool, host_bytes), wide, SlotStates(wide))

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes + self.tables.nbytes + sum(each.total_bytes for each in self.windows)

    def window(self, layer: int) -> WideWindow | None:
        return next((each for each in self.windows if layer in each.layers), None)

    def apply(self, update: CacheUpdate) -> None:
        """Apply a ledger's update: copies of states and blocks, also to and from the host tier, then tables and
        lengths. Raises HostTierError: copies to or from the host tier failed; all else is done."""
        failed = self.states.follow(update)
        for copies in update.copies:
            if isinstance(copies, BlockCopies):
                both = (torch.from_numpy(x).to(self.pool.device) for x in (copies.source, copies.target))
                self.pool.copy_blocks(*both)
            elif isinstance(copies, RowsPlaced):
                self._place(copies)
            elif isinstance(copies, RowsSaved | RowsRestored | CopyDiscarded):
                assert self.host is not None, "without a host tier nothing is saved"
                try:
                    self.host.apply(copies)
                except (KeyError, MemoryError, RuntimeError) as error:
                    failed.setdefault(copies.host_id, describe_error(error))
        self.tables.apply(update)
        if failed:
            raise HostTierError(failed, next(iter(failed.values())))

    def _place(self, placed: RowsPlaced) -> None:
        assert self.rotation is not None, "keys are turned"
        for layer, slots in enumerate(zip(placed.source, placed.target, strict=True)):
            of_layer = self.pool.of_layer(layer)
            source, target = (torch.from_numpy(each).to(self.pool.device) for each in slots)
            position = self.pool.position.view(-1)[source]
            source, position = (each[position >= placed.skipped] for each in (source, position))
            distance = torch.full_like(position, placed.distance)
            keys = self.rotation.turn(layer, of_layer.keys(source), distance)
            of_layer.copy_turned(source, target, keys, position + distance)


class LocalCache:
    """A ledger and the memory that follows it, in one place: for use without a scheduler and an executor."""

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu") -> None:
        self.ledger = Ledger(layout, size)
        self.paged = PagedCache.allocate(layout, size, device)

    def append(self, slots: list[int], counts: list[int]) -> None:
        self.ledger.append(slots, counts)
        self.sync()

    def sync(self) -> None:
        self.paged.apply(self.ledger.take_update())
