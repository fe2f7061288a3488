"""The accounting of the cache: who holds how much, what is free, what the next step will take.

Host arithmetic: it moves no KVs, knows no device and no model, so the scheduler and the simulator run it as it is.
The owner of the memory follows its updates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from winnow.cache.accounting.allocator import BlockAllocator, OutOfBlocksError
from winnow.cache.accounting.host_ledger import HostLedger
from winnow.cache.accounting.prefix_chain import Snapshot
from winnow.cache.accounting.prefix_index import PrefixIndex
from winnow.cache.accounting.prefix_rows import PrefixRows
from winnow.cache.accounting.row_tables import Demand, Growth, PendingUpdate, RowTables
from winnow.cache.accounting.shared_blocks import SharedBlocks
from winnow.cache.cache_size import CacheSize
from winnow.cache.layout import CacheLayout, IntArray, ceil_div
from winnow.cache.update import CacheUpdate, CopyDiscarded, RowsPlaced, RowsRestored, RowsSaved


@dataclass(frozen=True, eq=False)
class Holdings:
    """Contents of the memory that follows a ledger, once all updates are applied."""

    lengths: IntArray  # int32 [max_num_seqs, layers, heads]
    pages: Mapping[int, IntArray]  # of each slot that holds any, as its tables have them, and so blocks
    blocks: Mapping[int, IntArray]
    host_ids: frozenset[int]
    host_bytes: int


class Ledger:
    """Sequences in slots, their rows' lengths and blocks.

    A sequence is named by its slot, 0 <= slot < max_num_seqs. Its rows (one per layer and head) have tables and
    lengths of their own. Lengths change only here, by known amounts. A block with more than one holder is immutable:
    a sequence that is to write into it gets a copy first.

    Attributes:
        lengths: int32 [max_num_seqs, layers, heads], KVs of each row.
        host: copies of sequences in host memory, of at most `host_bytes`.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, host_bytes: int = 0) -> None:
        self.layout = layout
        self.size = size
        self.allocator = BlockAllocator(size.by_kind)
        self._rows = RowTables(layout, size, self.allocator)
        self.lengths = self._rows.lengths
        self.pages = self._rows.pages
        self._shared = SharedBlocks(self._rows)
        self.prefixes = PrefixIndex(layout, self.allocator, size.prefix_state_bytes(layout))
        self.prefix_rows = PrefixRows(self._rows, self._shared, self.prefixes)
        self.host = HostLedger(layout, host_bytes)
        self._is_even = bool(layout.has_row.all())
        self._free_slots = list(range(size.max_num_seqs))[::-1]

    # -- how much ------------------------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def table_bytes(self) -> int:
        """Everything but the blocks themselves, here and where they are followed: tables, lengths, free stack."""
        return self.size.nbytes(self.layout) - self.layout.device_bytes(self.size.by_kind)

    @property
    def used_bytes(self) -> int:
        return self.held_bytes + self.table_bytes

    @property
    def held_bytes(self) -> int:
        return self.layout.device_bytes(self.allocator.held)

    @property
    def cached_bytes(self) -> int:
        return self.layout.device_bytes(self.allocator.cached)

    @property
    def tier_bytes(self) -> int:
        """Bytes of blocks in use that lie on a tier."""
        return self.layout.tier_bytes(self.allocator.held)

    @property
    def peak_blocks(self) -> int:
        return self._rows.peak_blocks

    @property
    def peak_bytes(self) -> int:
        return self._rows.peak_bytes + self.table_bytes

    def bytes_of(self, num_blocks: int) -> int:
        """Return bytes of the device that blocks take, of each kind in the proportion of the cache."""
        return num_blocks * self.layout.device_bytes(self.size.by_kind) // self.size.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of the ledger itself, all on the host; the index's memory of prefixes is not counted."""
        return self.allocator.nbytes + self._rows.nbytes

    @property
    def capacity(self) -> int:
        """KVs in every row of a sequence that has the cache for itself."""
        return self.layout.block_size * (self.size.num_blocks // self.layout.rows_per_seq)

    def demand(self, slots: Sequence[int], counts: Sequence[int]) -> Demand:
        """Return what `append` would take; a tail that is shared now counts as copied."""
        return self._demand(self._growth(slots, counts), slots) if slots else Demand()

    def has_room_for(self, demand: Demand) -> bool:
        return self._rows.has_room_for(demand)

    def can_open(self, num_kvs: int) -> bool:
        """Return whether there are a slot and table pages for a new sequence of `num_kvs` KVs a row; no block is asked.

        Sequences that share blocks have tables of their own, so pages can be short where blocks are not. One sequence
        alone never lacks pages (`CacheSize.of_blocks`), so an expected row beyond all of them asks for all.
        """
        pages = min(self.layout.pages_for(num_kvs), self.size.num_pages)
        return bool(self._free_slots) and pages <= self.pages.num_free

    def blocks_held(self, slot: int) -> int:
        """Return blocks in the tables of a sequence, shared and reserved ones included."""
        return int(self._rows.num_blocks(slot).sum())

    def num_freed_by(self, slot: int) -> int:
        """Return how many blocks closing a sequence would free: those held by it alone, or by it and the index."""
        blocks = self.blocks_of(slot)
        return int((self.allocator.holders[blocks] - self.allocator.indexed[blocks] == 1).sum())

    def blocks_of(self, slot: int) -> IntArray:
        return self._rows.blocks_of(slot)

    @property
    def filled_bytes(self) -> int:
        """Device bytes of the slots that hold KVs of sequences; shared blocks count once."""
        filled = self._rows.filled_slots(self.size.num_blocks)
        kinds = self.allocator.kind_of(np.arange(len(filled)))
        count = np.bincount(kinds, weights=filled, minlength=len(self.layout.kinds)).astype(np.int64)
        return self.layout.device_bytes(count.tolist()) // self.layout.block_size

    # -- the life of a sequence ----------------------------------------------------------------------------------

    def open(self) -> int:
        """Take a slot for a new, empty sequence. The caller has checked `num_free_slots`."""
        return self._free_slots.pop()

    def reserve(self, slot: int, num_kvs: int) -> None:
        """Reserve blocks for `num_kvs` KVs in every row of an open sequence, until it is cleared. Raises
        OutOfBlocksError: there are not enough blocks or table pages; nothing has changed."""
        slots, num_blocks = np.array([slot], dtype=np.int64), ceil_div(num_kvs, self.layout.block_size)
        growth = self._rows.growth(slots, self.lengths[slots], num_blocks)
        if not self.has_room_for(growth.demand):
            raise OutOfBlocksError(f"no room for {num_kvs} KVs a row in slot {slot}")
        self._rows.grow(growth)
        self._rows.reserved[slot] = max(num_blocks, int(self._rows.reserved[slot]))

    def append(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Lengthen every row of sequence `slots[i]` by `counts[i]` KVs and find the blocks for them. Raises
        OutOfBlocksError: there is no room for `demand`; nothing has changed."""
        growth = self._growth(slots, counts)
        if not self.has_room_for(self._demand(growth, slots)):
            raise OutOfBlocksError(f"no room for {list(counts)} KVs a row in slots {list(slots)}")
        self._shared.own_tails(slots)
        self._rows.grow(growth)

    def restore(self, slot: int, lengths: IntArray) -> None:
        """Give an open, empty sequence rows of `lengths` KVs, [layers, heads], which may differ. Raises
        OutOfBlocksError: there are not enough blocks or table pages; nothing has changed."""
        assert not self.lengths[slot].any(), "only an empty sequence is restored"
        growth = self._rows.growth(np.array([slot], dtype=np.int64), lengths[None])
        if not self.has_room_for(growth.demand):
            raise OutOfBlocksError(f"no room for rows of up to {lengths.max()} KVs in slot {slot}")
        self._rows.grow(growth)

    def place(self, slot: int, snapshot: Snapshot, skipped: int, distance: int) -> None:
        """Lengthen rows by what a snapshot, each of whose rows holds its first `skipped` tokens, holds behind them,
        `distance` positions from where it was. Raises OutOfBlocksError: there is no room; nothing has changed."""
        held, slots = self.lengths[slot].copy(), np.array([slot], dtype=np.int64)
        lengths = held + snapshot.lengths - np.int32(skipped) * self.layout.has_row
        growth = self._rows.growth(slots, lengths[None])
        self.allocator.share(snapshot.blocks)  # no room is made of them
        try:
            if not self.has_room_for(self._demand(growth, [slot])):
                raise OutOfBlocksError(f"no room for {snapshot.lengths.max()} KVs a row in slot {slot}")
            self._shared.own_tails([slot])
            self._rows.grow(growth)
        finally:
            self.allocator.release(snapshot.blocks)
        source = self._slots_of(snapshot.blocks, snapshot.lengths, np.zeros_like(held))
        target = self._slots_of(self.blocks_of(slot), lengths, held)
        self._changes.copies.append(RowsPlaced(source, target, skipped, distance))

    def can_fork(self, slot: int) -> bool:
        return bool(self._free_slots) and len(self.pages.of(slot)) <= self.pages.num_free

    def fork(self, slot: int) -> int:
        child = self.open()
        self.share(slot, child)
        return child

    def share(self, slot: int, child: int) -> None:
        blocks = self.blocks_of(slot)
        self.allocator.share(blocks)
        self._rows.hold(child, self.lengths[slot], blocks)
        self._shared.add_with_tail(slot)
        self._shared.add_with_tail(child)

    @property
    def any_shared(self) -> bool:
        return bool(self._shared.slots)

    def is_shared(self, slot: int) -> bool:
        """Return whether another sequence, or the index, holds a block of this one."""
        return self._shared.is_shared(slot)

    def own_or_forget(self, slot: int) -> bool:
        """Make a sequence the only holder of its blocks, which are about to change: shared ones are copied.

        Where memory lacks for that, the index forgets them. Returns False, with nothing changed but the index, if other
        sequences hold too many for copies to find room.
        """
        if not self._shared.can_own(slot):
            self.prefixes.forget(self.blocks_of(slot))
        if not self._shared.can_own(slot):
            return False
        self._shared.own(slot)
        return True

    def is_shared_with_sequences(self, slot: int) -> bool:
        """Return whether another sequence, not the index alone, holds a block of this one."""
        if not self.is_shared(slot):
            return False
        blocks = self.blocks_of(slot)
        return bool((self.allocator.holders[blocks] - self.allocator.indexed[blocks] > 1).any())

    def own_front(self, slot: int, lengths: IntArray) -> None:
        """Make a sequence the only holder of the blocks that `shrink` to `lengths`, [layers, heads], would leave it.

        What others hold is copied. Where memory lacks for that, the index forgets its blocks. Raises OutOfBlocksError:
        other sequences hold too many for copies to find room.
        """
        if self._shared.own_front(slot, lengths):
            return
        self.prefixes.forget(self.blocks_of(slot))
        if not self._shared.own_front(slot, lengths):
            raise OutOfBlocksError(f"no room for copies of the first blocks of slot {slot}")

    def shrink(self, slots: Sequence[int], lengths: IntArray) -> IntArray:
        """Cut rows to `lengths`, [B, layers, heads]. Returns how many blocks fewer each sequence holds, int64 [B].

        What the rows keep has been moved to their front. Blocks and table pages past it are given back.
        """
        slot_array = np.asarray(slots, dtype=np.int64)
        held = self.lengths[slot_array]
        assert (lengths <= held).all(), "a row cannot shrink to more than it holds"
        have, keep = self._rows.num_blocks_of(slot_array, held), self._rows.num_blocks_of(slot_array, lengths)
        for i, slot in enumerate(slots):  # one by one: they may hold blocks together
            self.allocator.release(self._rows.blocks([slot], keep[i : i + 1], have[i : i + 1]))
        self._rows.set_lengths(slot_array, lengths.copy())
        for slot, most in zip(slots, keep.max(axis=(1, 2)).tolist(), strict=True):
            self.pages.trim(slot, most)
            self._shared.is_shared(slot)  # what it shared may have been behind the cut
        given: IntArray = (have - keep).sum(axis=(1, 2))
        return given

    def take_back(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Cut the last `counts[i]` KVs, which were just appended, off every row of sequence `slots[i]`."""
        slot_array = np.asarray(slots, dtype=np.int64)
        less = np.asarray(counts, dtype=np.int32)[:, None, None] * self.layout.has_row
        self.shrink(slots, self.lengths[slot_array] - less)

    def drop_unseen(self, slots: Sequence[int]) -> None:
        """Give back the blocks at the front of rows of windowed layers that no later token of a sequence sees.

        The rows hold the last KVs of their sequences, in order. The blocks behind take the place of those that go.
        Sequences with reserved blocks keep them.
        """
        if not self.layout.has_windows or not len(slots):
            return
        reserved = self._rows.reserved
        slots = [slot for slot in slots if not reserved[slot]] if reserved.any() else slots
        num_blocks = self.layout.blocks_passed(self.lengths[np.asarray(slots, dtype=np.int64), :, 0])
        for i in np.flatnonzero(num_blocks.any(axis=1)).tolist():
            self._rows.drop_front(slots[i], num_blocks[i])

    def clear(self, slot: int) -> None:
        """Empty a sequence, which stays open: its blocks lose a holder, its pages are free."""
        self._rows.clear(slot)
        self._shared.discard(slot)

    def close(self, slot: int) -> None:
        self.clear(slot)
        self._free_slots.append(slot)
        self._changes.close(slot)

    # -- host tier -----------------------------------------------------------------------------------------------

    def save(self, slot: int, state_bytes: int = 0) -> int:
        """Copy all rows of a sequence, which stays as it is, to host memory. The copy shares no block. Returns its id.

        `state_bytes` are those of what else the executor keeps of the sequence, which travels with it. Raises
        OutOfHostMemoryError: the host tier has no room for it; nothing has changed.
        """
        assert not self._changes.restores(slot), "a sequence is saved after the update that restores it"
        blocks = self.blocks_of(slot)
        host_id = self.host.put(self.lengths[slot].copy(), state_bytes)
        self._changes.copies.append(RowsSaved(slot, host_id, blocks))
        return host_id

    def demand_of(self, host_id: int, count: int) -> Demand:
        """Return what restoring a copy and then appending `count` KVs to each of its rows would take."""
        want = self.layout.row_blocks(self.host.copies[host_id].lengths + self.layout.even_rows(count))
        pages = self.layout.pages_for(int(want.max()) * self.layout.block_size)
        return Demand(self.layout.by_kind(want), pages)

    def load(self, host_id: int, slot: int) -> None:
        """Give an open, empty sequence the rows of a copy in host memory, in blocks of its own. The copy stays. Raises
        OutOfBlocksError: there are not enough blocks or table pages; nothing has changed."""
        self.restore(slot, self.host.copies[host_id].lengths)
        self._changes.copies.append(RowsRestored(host_id, slot, self.blocks_of(slot)))

    def discard(self, host_id: int) -> None:
        self.host.discard(host_id)
        self._changes.copies.append(CopyDiscarded(host_id))

    # -- what others must follow ---------------------------------------------------------------------------------

    def take_update(self) -> CacheUpdate:
        """Return all that changed since the last call."""
        return self._changes.take(self.pages)

    def repeat_update(self) -> None:
        """Repeat the last update in the next one, for a reader that may not have applied it completely.

        Copies of blocks are not made again, so that what sequences hold then has to be computed again.
        """
        self._changes.repeat()

    def holdings(self) -> Holdings:
        slots = np.flatnonzero(self.lengths.any(axis=(1, 2))).tolist()
        return Holdings(
            self.lengths,
            {slot: self.pages.of(slot) for slot in slots},
            {slot: self.blocks_of(slot) for slot in slots},
            frozenset(self.host.copies),
            self.host.used_bytes,
        )

    # -- invariants ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        open_slots = np.setdiff1d(np.arange(self.size.max_num_seqs), self._free_slots)
        assert len(open_slots) + len(self._free_slots) == self.size.max_num_seqs, "a slot is free twice"
        owners, blocks = self._rows.check_integrity(open_slots)
        holders = np.bincount(blocks, minlength=self.size.num_blocks)
        shared = (holders + self.allocator.indexed)[blocks] > 1
        unknowing = set(owners[shared].tolist()) - self._shared.slots
        assert not unknowing, f"slots {unknowing} share blocks unknowingly"
        self.allocator.check_integrity(holders)
        self.prefixes.check_integrity()
        self.host.check_integrity()
        self.pages.check_integrity()
        assert not self.lengths[self._free_slots].any(), "a free slot has a length"
        assert not self._rows.reserved[self._free_slots].any(), "a free slot has blocks reserved"

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _changes(self) -> PendingUpdate:
        return self._rows.changes

    def _slots_of(self, blocks: IntArray, lengths: IntArray, first: IntArray) -> tuple[IntArray, ...]:
        """Return, of each layer, the slots of KVs from number `first` of each row on, whose blocks lie row by row."""
        counts, size = self.layout.row_blocks(lengths), self.layout.block_size
        begins = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        found = []
        for layer in range(len(lengths)):
            of_rows = zip(begins[layer], first[layer], lengths[layer], strict=True)
            numbers = [begin * size + np.arange(start, end) for begin, start, end in of_rows]
            at = np.concatenate(numbers)
            found.append(blocks[at // size].astype(np.int64) * size + at % size)
        return tuple(found)

    def _growth(self, slots: Sequence[int], counts: Sequence[int]) -> Growth:
        slot_array = np.asarray(slots, dtype=np.int64)
        more = np.asarray(counts, dtype=np.int32)[:, None, None]
        lengths = self.lengths[slot_array] + (more if self._is_even else more * self.layout.has_row)
        return self._rows.growth(slot_array, lengths)

    def _demand(self, growth: Growth, slots: Sequence[int]) -> Demand:
        return growth.demand.plus(Demand(self._shared.tails(slots)))
