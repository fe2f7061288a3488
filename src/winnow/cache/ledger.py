"""The accounting of the cache: who holds how much, what is free, what the next step will take.

Host arithmetic: it moves no KVs, knows no device and no model, so the scheduler and the simulator run it as it is.
The owner of the memory follows its updates.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from winnow.cache.allocator import BlockAllocator, OutOfBlocksError
from winnow.cache.host_ledger import HostLedger
from winnow.cache.layout import CacheLayout, CacheSize, IntArray, ceil_div
from winnow.cache.prefix_index import PrefixIndex, PrefixKey, Snapshot
from winnow.cache.table_pages import TablePages
from winnow.cache.update import (
    BlockCopies,
    CacheUpdate,
    CopyDiscarded,
    RowLengths,
    RowsRestored,
    RowsSaved,
)


class Demand(NamedTuple):
    """What appending would take, at most."""

    blocks: int = 0
    pages: int = 0

    def plus(self, other: "Demand") -> "Demand":
        return Demand(self.blocks + other.blocks, self.pages + other.pages)


class _Growth(NamedTuple):
    """Of sequences that are appended to."""

    slots: IntArray  # int64 [B]
    lengths: IntArray  # of each row afterwards, int32 [B, layers, heads]
    have: IntArray  # blocks of each row before, int32 [B, layers, heads]
    want: IntArray  # and afterwards
    num_blocks: int  # that all rows lack
    pages: IntArray  # that each sequence lacks, int64 [B]
    demand: Demand


class Ledger:
    """Sequences in slots, their rows' lengths and blocks.

    A sequence is named by its slot, 0 <= slot < max_num_seqs. Its rows (one per layer and head) have tables and
    lengths of their own. Lengths change only here, by known amounts. A block with more than one holder is immutable:
    a sequence that is to write into it gets a copy first.

    Attributes:
        lengths: int32 [max_num_seqs, layers, heads], KVs of each row.
        peak_blocks: most blocks that were in use at a time.
        host: copies of sequences in host memory, of at most `host_bytes`.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, host_bytes: int = 0) -> None:
        self.layout = layout
        self.size = size
        self.allocator = BlockAllocator(size.num_blocks)
        self.pages = TablePages(layout, size)
        self.prefixes = PrefixIndex(layout, self.allocator)
        self.host = HostLedger(layout, host_bytes)
        shape = (size.max_num_seqs, layout.num_layers, layout.num_kv_heads)
        self.lengths = np.zeros(shape, dtype=np.int32)
        self.peak_blocks = 0
        self._reserved = np.zeros(size.max_num_seqs, dtype=np.int32)  # blocks that each row has at least
        windows = layout.windows or (None,) * layout.num_layers
        self._windowed = np.array([window is not None for window in windows])
        self._windows = np.array([window or 1 for window in windows], dtype=np.int64)
        self._free_slots = list(range(size.max_num_seqs))[::-1]
        # Slots that took part in a fork. The first kind may hold blocks with other holders; the second kind may
        # have such a block at the tail of a row, where the next KV would be written.
        self._sharing: set[int] = set()
        self._shared_tail: set[int] = set()
        # What the next update says.
        self._closed: list[int] = []
        self._copies: list[BlockCopies | RowsSaved | RowsRestored | CopyDiscarded] = []
        self._entries: list[IntArray] = []
        self._paged: set[int] = set()
        self._lengths: list[RowLengths] = []
        self._last_update = CacheUpdate()

    # -- how much ------------------------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def table_bytes(self) -> int:
        """Everything but the blocks themselves, here and where they are followed: tables, lengths, free stack."""
        return self.size.nbytes(self.layout) - self.size.num_blocks * self.layout.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use, and of all tables."""
        return self.allocator.num_used * self.layout.block_bytes + self.table_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * self.layout.block_bytes + self.table_bytes

    @property
    def nbytes(self) -> int:
        """Of the ledger itself, all on the host."""
        return self.allocator.nbytes + self.pages.nbytes + self.lengths.nbytes + self._reserved.nbytes

    @property
    def capacity(self) -> int:
        """KVs in every row of a sequence that has the cache for itself."""
        return self.layout.block_size * (self.size.num_blocks // self.layout.rows_per_seq)

    def demand(self, slots: Sequence[int], counts: Sequence[int]) -> Demand:
        """What `append` would take; a tail that is shared now counts as copied."""
        return self._growth(slots, counts).demand if slots else Demand()

    def has_room_for(self, demand: Demand) -> bool:
        return demand.blocks <= self.allocator.num_free and demand.pages <= self.pages.num_free

    def can_open(self, num_kvs: int) -> bool:
        """Whether there are a slot and table pages for a new sequence of `num_kvs` KVs a row; blocks are not asked.

        Sequences that share blocks have tables of their own, so pages can be short where blocks are not. One sequence
        alone never lacks pages (`CacheSize.of_blocks`), so an expected row beyond all of them asks for all.
        """
        pages = min(self.layout.pages_for(num_kvs), self.size.num_pages)
        return bool(self._free_slots) and pages <= self.pages.num_free

    def blocks_held(self, slot: int) -> int:
        """Blocks in the tables of a sequence, shared and reserved ones included."""
        return int(self._num_blocks(slot).sum())

    def num_freed_by(self, slot: int) -> int:
        """Blocks that would come free if a sequence were closed: those that no other holds, but for the index."""
        blocks = self.blocks_of(slot)
        return int((self.allocator.holders[blocks] - self.allocator.indexed[blocks] == 1).sum())

    def blocks_of(self, slot: int) -> IntArray:
        """The ids of the blocks that hold KVs of a sequence, int32 [n], row by row."""
        num_blocks = self._blocks_for(self.lengths[slot])
        return self._blocks([slot], np.zeros_like(num_blocks)[None], num_blocks[None])

    def num_filled_slots(self) -> int:
        """Slots of the pool that hold KVs of sequences; those of shared blocks count once."""
        slots = np.flatnonzero(self.lengths.any(axis=(1, 2)))
        num_blocks = self._blocks_for(self.lengths[slots])
        counts = num_blocks.ravel()
        blocks = self._blocks(slots.tolist(), np.zeros_like(num_blocks), num_blocks)
        entry = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        left = np.repeat(self.lengths[slots].ravel(), counts) - entry * self.layout.block_size
        filled = np.zeros(self.size.num_blocks, dtype=np.int64)
        np.maximum.at(filled, blocks, np.minimum(left, self.layout.block_size))
        return int(filled.sum())

    # -- the life of a sequence ----------------------------------------------------------------------------------

    def open(self) -> int:
        """Take a slot for a new, empty sequence. The caller has checked `num_free_slots`."""
        return self._free_slots.pop()

    def reserve(self, slot: int, num_kvs: int) -> None:
        """Let an open sequence hold blocks for `num_kvs` KVs in every row, used or not, until it is cleared.

        Raises:
            OutOfBlocksError: there are not enough blocks or table pages; nothing has changed.
        """
        num_blocks = ceil_div(num_kvs, self.layout.block_size)
        slots, lengths = np.array([slot], dtype=np.int64), self.lengths[[slot]]
        have = self._num_blocks(slot)[None]
        want = np.maximum(have, num_blocks)
        pages = self.pages.missing(slots, want.max(axis=(1, 2)))
        demand = Demand(int((want - have).sum()), int(pages.sum()))
        if not self.has_room_for(demand):
            raise OutOfBlocksError(f"no room for {num_kvs} KVs a row in slot {slot}")
        self._grow(_Growth(slots, lengths, have, want, demand.blocks, pages, demand))
        self._reserved[slot] = max(num_blocks, int(self._reserved[slot]))

    def append(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Lengthen every row of sequence `slots[i]` by `counts[i]` KVs and find the blocks for them.

        Raises:
            OutOfBlocksError: there is no room for `demand`; nothing has changed.
        """
        growth = self._growth(slots, counts)
        if not self.has_room_for(growth.demand):
            raise OutOfBlocksError(f"no room for {list(counts)} KVs a row in slots {list(slots)}")
        for slot in self._shared_tail.intersection(slots):
            self._own_tail(slot)
        self._grow(growth)

    def restore(self, slot: int, lengths: IntArray) -> None:
        """Give an open, empty sequence rows of `lengths` KVs, [layers, heads], which may differ.

        Raises:
            OutOfBlocksError: there are not enough blocks or table pages; nothing has changed.
        """
        assert not self.lengths[slot].any(), "only an empty sequence is restored"
        have = self._num_blocks(slot)[None]
        want = np.maximum(self._blocks_for(lengths)[None], have)
        slots, num_blocks = np.array([slot], dtype=np.int64), int((want - have).sum())
        pages = self.pages.missing(slots, want.max(axis=(1, 2)))
        demand = Demand(num_blocks, int(pages.sum()))
        if not self.has_room_for(demand):
            raise OutOfBlocksError(f"no room for rows of up to {lengths.max()} KVs in slot {slot}")
        self._grow(_Growth(slots, lengths[None], have, want, num_blocks, pages, demand))

    def can_fork(self, slot: int) -> bool:
        return bool(self._free_slots) and len(self.pages.of(slot)) <= self.pages.num_free

    def fork(self, slot: int) -> int:
        """A new sequence that holds the same blocks. The first to write into a shared block gets a copy."""
        child = self.open()
        self.share(slot, child)
        return child

    def share(self, slot: int, child: int) -> None:
        """Let `child`, open and empty, hold the blocks of `slot` too."""
        children, blocks = np.array([child], dtype=np.int64), self.blocks_of(slot)
        self._paged.update(self.pages.grow(children, np.array([len(self.pages.of(slot))], dtype=np.int64)))
        self.lengths[child] = self.lengths[slot]
        num_blocks = self._blocks_for(self.lengths[[child]])
        self._enter(self.pages.index(children, np.zeros_like(num_blocks), num_blocks), blocks)
        self.allocator.share(blocks)
        self._lengths.append(RowLengths(children, self.lengths[children]))
        self._sharing |= {slot, child}
        self._shared_tail |= {slot, child}

    @property
    def any_shared(self) -> bool:
        """Whether any two sequences may hold a block together."""
        return bool(self._sharing)

    def is_shared(self, slot: int) -> bool:
        """Whether another sequence holds a block of this one."""
        if slot in self._sharing and not self._num_shared(slot):
            self._sharing.discard(slot)
            self._shared_tail.discard(slot)
        return slot in self._sharing

    def can_own(self, slot: int) -> bool:
        """Whether `own` would find blocks for its copies."""
        return slot not in self._sharing or self._num_shared(slot) <= self.allocator.num_free

    def own(self, slot: int) -> None:
        """Replace all blocks that have other holders by copies.

        Raises:
            OutOfBlocksError: `can_own` is False; nothing has changed.
        """
        if slot not in self._sharing:
            return
        self._copy_shared(slot, np.zeros_like(self.lengths[slot]))
        self._sharing.discard(slot)
        self._shared_tail.discard(slot)
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)

    def shrink(self, slots: Sequence[int], lengths: IntArray) -> IntArray:
        """Cut rows to `lengths`, [B, layers, heads], none above what they hold.

        What the rows keep has been moved to their front. Blocks and table pages past it are given back.

        Returns:
            How many blocks fewer each sequence holds, int64 [B].
        """
        slot_array = np.asarray(slots, dtype=np.int64)
        held = self.lengths[slot_array]
        assert (lengths <= held).all(), "a row cannot shrink to more than it holds"
        reserved = self._reserved[slot_array, None, None]
        have = np.maximum(self._blocks_for(held), reserved)
        keep = np.maximum(self._blocks_for(lengths), reserved)
        for i, slot in enumerate(slots):  # one by one: they may hold blocks together
            self.allocator.release(self._blocks([slot], keep[i : i + 1], have[i : i + 1]))
        self.lengths[slot_array] = lengths
        self._lengths.append(RowLengths(slot_array, lengths.copy()))
        for slot, most in zip(slots, keep.max(axis=(1, 2)).tolist(), strict=True):
            self.pages.trim(slot, most)
        given: IntArray = (have - keep).sum(axis=(1, 2))
        return given

    def drop_unseen(self, slots: Sequence[int]) -> None:
        """Give back the blocks at the front of rows of windowed layers that no later token of a sequence sees.

        The rows hold the last KVs of their sequences, in order. The blocks behind take the place of those that go.
        Sequences with reserved blocks keep them.
        """
        slots = [slot for slot in slots if not self._reserved[slot]] if self._reserved.any() else slots
        if not self._windowed.any() or not len(slots):
            return
        slot_array = np.asarray(slots, dtype=np.int64)
        # The next token sees itself, and window - 1 KVs before it. Heads of a layer are alike.
        passed = self.lengths[slot_array, :, 0] - (self._windows - 1)
        num_blocks = np.where(
            self._windowed, np.maximum(passed, 0) // self.layout.block_size, 0
        )  # [B, layers]
        for i in np.flatnonzero(num_blocks.any(axis=1)).tolist():
            self._drop_front(slots[i], num_blocks[i])

    def _drop_front(self, slot: int, num_blocks: IntArray) -> None:
        """Take `num_blocks`, [layers], off the front of the rows of a sequence."""
        held, slots = self._num_blocks(slot), np.array([slot], dtype=np.int64)
        dropped = np.broadcast_to(num_blocks[:, None], held.shape)
        left = np.where(dropped > 0, held - dropped, 0)
        none = np.zeros_like(held)
        released = self._blocks([slot], none[None], dropped[None])
        moved = self._blocks([slot], dropped[None], (dropped + left)[None])
        self._enter(self.pages.index(slots, none[None], left[None]), moved)
        self.allocator.release(released)
        self.lengths[slot] -= (dropped * self.layout.block_size).astype(np.int32)
        self._lengths.append(RowLengths(slots, self.lengths[slots]))
        self.pages.trim(slot, int(self._num_blocks(slot).max()))

    def clear(self, slot: int) -> None:
        """Empty a sequence, which stays open: its blocks lose a holder, its pages are free."""
        num_blocks = self._num_blocks(slot)[None]
        self.allocator.release(self._blocks([slot], np.zeros_like(num_blocks), num_blocks))
        self.pages.trim(slot, 0)
        self._reserved[slot] = 0
        self.lengths[slot] = 0
        emptied = np.array([slot], dtype=np.int64)
        self._lengths.append(RowLengths(emptied, self.lengths[emptied]))
        self._sharing.discard(slot)
        self._shared_tail.discard(slot)

    def close(self, slot: int) -> None:
        """End a sequence: empty it, and its slot is free."""
        self.clear(slot)
        self._copies = [c for c in self._copies if not (isinstance(c, RowsRestored) and c.slot == slot)]
        self._free_slots.append(slot)
        self._closed.append(slot)

    # -- host tier -----------------------------------------------------------------------------------------------

    def save(self, slot: int, state_bytes: int = 0) -> int:
        """Copy all rows of a sequence to host memory. The sequence stays as it is. Returns the copy's id.

        The copy is private: it has the content of blocks that others hold too, and shares none.

        Args:
            state_bytes: of what else the executor keeps of the sequence, which travels with it.

        Raises:
            OutOfHostMemoryError: the host tier has no room for it; nothing has changed.
        """
        assert not any(isinstance(c, RowsRestored) and c.slot == slot for c in self._copies), (
            "a sequence is saved after the update that restores it"
        )
        blocks = self.blocks_of(slot)
        host_id = self.host.put(self.lengths[slot].copy(), len(blocks), state_bytes)
        self._copies.append(RowsSaved(slot, host_id, blocks))
        return host_id

    def demand_of(self, host_id: int, count: int) -> Demand:
        """What restoring a copy and then appending `count` KVs to each of its rows would take."""
        want = self._blocks_for(self.host.copies[host_id].lengths + count)
        return Demand(int(want.sum()), self.layout.pages_for(int(want.max()) * self.layout.block_size))

    def load(self, host_id: int, slot: int) -> None:
        """Give an open, empty sequence the rows of a copy in host memory, in blocks of its own. The copy stays.

        Raises:
            OutOfBlocksError: there are not enough blocks or table pages; nothing has changed.
        """
        self.restore(slot, self.host.copies[host_id].lengths)
        self._copies.append(RowsRestored(host_id, slot, self.blocks_of(slot)))

    def discard(self, host_id: int) -> None:
        """Give back the host memory of a copy."""
        self.host.discard(host_id)
        self._copies.append(CopyDiscarded(host_id))

    # -- prefixes ------------------------------------------------------------------------------------------------

    def adopt(self, slot: int, keys: Sequence[PrefixKey]) -> None:
        """Let an open, empty sequence begin with the blocks of a known prefix.

        Raises:
            OutOfBlocksError: there are not enough table pages; nothing has changed.
        """
        assert not self.lengths[slot].any(), "only an empty sequence adopts a prefix"
        if not keys:
            return
        assert not self._reserved[slot], "what is reserved is not shared"
        shape = (1, self.layout.num_layers, self.layout.num_kv_heads)
        slots, want = np.array([slot], dtype=np.int64), np.full(shape, len(keys), dtype=np.int32)
        pages = self.pages.missing(slots, want.max(axis=(1, 2)))
        if int(pages.sum()) > self.pages.num_free:
            raise OutOfBlocksError(f"no table pages for a prefix of {len(keys)} blocks in slot {slot}")
        blocks = self.prefixes.hold(keys)
        self._paged.update(self.pages.grow(slots, pages))
        self._enter(self.pages.index(slots, np.zeros_like(want), want), blocks.T.ravel())
        self.lengths[slot] = len(keys) * self.layout.block_size
        self._lengths.append(RowLengths(slots, self.lengths[slots]))
        self._sharing.add(slot)
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)

    def remember(
        self,
        slot: int,
        index: int,
        key: PrefixKey,
        token_ids: tuple[int, ...],
        num_computed: int | None = None,
    ) -> None:
        """Let the index know block `index` of a sequence, counted from its first token, in each row.

        It holds the KVs of `token_ids`, as they were computed.

        Args:
            num_computed: tokens of the sequence that its rows end with; None: as many as the longest row has.
        """
        rows = self.lengths[[slot]]
        computed = rows.max() if num_computed is None else num_computed
        first = index - (computed - rows) // self.layout.block_size
        self.prefixes.put(key, token_ids, self._blocks([slot], first, first + 1))
        self._sharing.add(slot)

    def take_snapshot(
        self,
        slot: int,
        key: PrefixKey,
        token_ids: Sequence[int],
        rule: Hashable,
        num_rounds: int = 1,
        position_offset: int = 0,
    ) -> None:
        """Let the index hold the rows of a sequence as they are, which hold all that stays of `token_ids`.

        The index gets copies of partly filled blocks, since the sequence goes on to fill them. No effect if memory
        lacks for these, or if a snapshot of that key is known.
        """
        if self.prefixes.knows(key):
            self.prefixes.touch([key])
            return
        blocks, tails = self.blocks_of(slot), self._tails(self.lengths[slot])
        source = blocks[tails]
        if len(source) > self.allocator.num_free:
            return
        if len(source):
            blocks[tails] = target = self.allocator.allocate(len(source))
            self._copies.append(BlockCopies(source, target))
        snapshot = Snapshot.of(key, token_ids, rule, self.lengths[slot], blocks, num_rounds, position_offset)
        self.prefixes.put_snapshot(snapshot)
        self.allocator.release(blocks[tails])
        self._sharing.add(slot)

    def take_blocks_for(self, lengths: IntArray) -> IntArray | None:
        """Blocks for rows of `lengths` KVs, [layers, heads], that come from elsewhere.

        They go to `keep_snapshot`, or back to the allocator.

        Returns:
            int32 [n]; None: memory lacks.
        """
        count = int(self._blocks_for(lengths).sum())
        return self.allocator.allocate(count) if count <= self.allocator.num_free else None

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Let the index alone hold a snapshot whose blocks `take_blocks_for` gave, and which are filled now."""
        self.prefixes.put_snapshot(snapshot)
        self.allocator.release(snapshot.blocks)

    def has_pages_for(self, snapshot: Snapshot) -> bool:
        """Whether a new sequence finds table pages for its rows."""
        return self.layout.pages_for(int(snapshot.lengths.max())) <= self.pages.num_free

    def resume(self, slot: int, snapshot: Snapshot) -> None:
        """Let an open, empty sequence begin with a known snapshot, with copies of the partly filled blocks.

        Raises:
            OutOfBlocksError: there are not enough table pages; nothing has changed.
        """
        assert not self.lengths[slot].any(), "only an empty sequence resumes"
        slots, want = np.array([slot], dtype=np.int64), self._blocks_for(snapshot.lengths)[None]
        pages = self.pages.missing(slots, want.max(axis=(1, 2)))
        if int(pages.sum()) > self.pages.num_free:
            raise OutOfBlocksError(
                f"no table pages for rows of up to {snapshot.lengths.max()} KVs in slot {slot}"
            )
        blocks, tails = snapshot.blocks.copy(), self._tails(snapshot.lengths)
        source = blocks[tails]
        self.prefixes.touch([snapshot.key])
        self.allocator.share(blocks)
        if len(source) > self.allocator.num_free:
            self.prefixes.drop_snapshot(snapshot)  # so that the sequence has these blocks for itself
        elif len(source):
            blocks[tails] = target = self.allocator.allocate(len(source))
            self.allocator.release(source)
            self._copies.append(BlockCopies(source, target))
        self._paged.update(self.pages.grow(slots, pages))
        self._enter(self.pages.index(slots, np.zeros_like(want), want), blocks)
        self.lengths[slot] = snapshot.lengths
        self._lengths.append(RowLengths(slots, self.lengths[slots]))
        self._sharing.add(slot)
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)

    def own_or_forget(self, slot: int) -> bool:
        """Let a sequence have its blocks for itself, since they will change: copy those that others hold.

        Where memory lacks for that, the index forgets them. Returns False, with nothing changed but the index, if other
        sequences hold so many that copies find no room.
        """
        if not self.can_own(slot):
            self.prefixes.forget(self.blocks_of(slot))
        if not self.can_own(slot):
            return False
        self.own(slot)
        return True

    # -- what others must follow ---------------------------------------------------------------------------------

    def take_update(self) -> CacheUpdate:
        """All that changed since the last call."""
        entries = np.concatenate(self._entries) if self._entries else np.empty(0, dtype=np.int64)
        update = CacheUpdate(
            closed=tuple(self._closed),
            copies=tuple(self._copies),
            # An index may stand here twice; what it names is read now, so both say the same.
            entries=entries,
            blocks=self.pages.entries.reshape(-1)[entries],
            pages=tuple((slot, tuple(self.pages.of(slot).tolist())) for slot in sorted(self._paged)),
            lengths=tuple(self._lengths),
        )
        self._closed, self._copies, self._entries, self._lengths = [], [], [], []
        self._paged = set()
        self._last_update = update
        return update

    def repeat_update(self) -> None:
        """Let the next update also say what the last one said, which its reader may not have followed to the end.

        Copies of blocks are not made again, so that what sequences hold then has to be computed again.
        """
        last, self._last_update = self._last_update, CacheUpdate()
        discarded = [copies for copies in last.copies if isinstance(copies, CopyDiscarded)]
        self._closed[:0], self._copies[:0], self._lengths[:0] = last.closed, discarded, last.lengths
        self._entries.insert(0, last.entries)
        self._paged |= {slot for slot, _ in last.pages}

    # -- invariants ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert what must hold between steps."""
        open_slots = np.setdiff1d(np.arange(self.size.max_num_seqs), self._free_slots)
        assert len(open_slots) + len(self._free_slots) == self.size.max_num_seqs, "a slot is free twice"
        num_blocks = np.maximum(
            self._blocks_for(self.lengths[open_slots]), self._reserved[open_slots, None, None]
        )
        blocks = self._blocks(open_slots.tolist(), np.zeros_like(num_blocks), num_blocks)
        owners = np.repeat(open_slots, num_blocks.sum(axis=(1, 2)))
        holdings = np.sort(owners * self.size.num_blocks + blocks)
        twice = holdings[1:][holdings[1:] == holdings[:-1]] // self.size.num_blocks
        assert not len(twice), f"slot {twice[0]} holds a block twice"
        holders = np.bincount(blocks, minlength=self.size.num_blocks)
        shared = (holders + self.allocator.indexed)[blocks] > 1
        unknowing = set(owners[shared].tolist()) - self._sharing
        assert not unknowing, f"slots {unknowing} share blocks unknowingly"
        self.allocator.check_integrity(holders)
        self.prefixes.check_integrity()
        self.host.check_integrity()
        self.pages.check_integrity()
        assert not self.lengths[self._free_slots].any(), "a free slot has a length"
        assert not self._reserved[self._free_slots].any(), "a free slot has blocks reserved"

    # -- inside --------------------------------------------------------------------------------------------------

    def _blocks_for(self, lengths: IntArray) -> IntArray:
        return -(-lengths // self.layout.block_size)

    def _tails(self, lengths: IntArray) -> IntArray:
        """Which blocks of rows of `lengths`, [layers, heads], are partly filled: int64 [n], counted row by row."""
        ends = self._blocks_for(lengths).ravel().cumsum() - 1
        tails: IntArray = ends[lengths.ravel() % self.layout.block_size > 0]
        return tails

    def _num_blocks(self, slot: int) -> IntArray:
        """Of each row of a sequence, reserved ones included, [layers, heads]."""
        num_blocks: IntArray = np.maximum(self._blocks_for(self.lengths[slot]), self._reserved[slot])
        return num_blocks

    def _growth(self, slots: Sequence[int], counts: Sequence[int]) -> _Growth:
        """What appending would do."""
        slot_array = np.asarray(slots, dtype=np.int64)
        before = self.lengths[slot_array]
        after = before + np.asarray(counts, dtype=np.int32)[:, None, None]
        reserved = self._reserved[slot_array, None, None]
        have = np.maximum(self._blocks_for(before), reserved)
        want = np.maximum(self._blocks_for(after), reserved)
        copied = sum(self._num_shared_tails(slot) for slot in self._shared_tail.intersection(slots))
        pages = self.pages.missing(slot_array, want.max(axis=(1, 2)))
        num_blocks = int((want - have).sum())
        demand = Demand(num_blocks + copied, int(pages.sum()))
        return _Growth(slot_array, after, have, want, num_blocks, pages, demand)

    def _grow(self, growth: _Growth) -> None:
        """Take the blocks and pages that rows lack and enter them into the tables."""
        if growth.demand.pages:
            self._paged.update(self.pages.grow(growth.slots, growth.pages))
        if growth.num_blocks:
            index = self.pages.index(growth.slots, growth.have, growth.want)
            self._enter(index, self.allocator.allocate(growth.num_blocks))
        self.lengths[growth.slots] = growth.lengths
        self._lengths.append(RowLengths(growth.slots, growth.lengths))
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)

    def _enter(self, index: IntArray, blocks: IntArray) -> None:
        self.pages.entries.reshape(-1)[index] = blocks
        self._entries.append(index)

    def _blocks(self, slots: Iterable[int], first: IntArray, last: IntArray) -> IntArray:
        """What stands in the entries first <= j < last of each row, int32 [n]."""
        index = self.pages.index(np.fromiter(slots, dtype=np.int64), first, last)
        found: IntArray = self.pages.entries.reshape(-1)[index]
        return found

    def _tail_range(self, slot: int) -> tuple[IntArray, IntArray]:
        """The entry of the partly filled last block of each row, half-open; empty where it is full."""
        lengths = self.lengths[slot]
        return lengths // self.layout.block_size, self._blocks_for(lengths)

    def _num_shared_tails(self, slot: int) -> int:
        """Rows whose partly filled last block has other holders."""
        first, last = self._tail_range(slot)
        return int((self.allocator.holders[self._blocks([slot], first[None], last[None])] > 1).sum())

    def _own_tail(self, slot: int) -> None:
        """Copy-on-write: replace the shared, partly filled last blocks of a sequence by copies of its own."""
        self._shared_tail.discard(slot)
        self._copy_shared(slot, self._tail_range(slot)[0])

    def _copy_shared(self, slot: int, first: IntArray) -> None:
        """Replace the shared ones among the blocks from `first`, [layers, heads], on by copies."""
        last = self._num_blocks(slot)
        index = self.pages.index(np.array([slot], dtype=np.int64), first[None], last[None])
        blocks = self.pages.entries.reshape(-1)[index]
        shared = self.allocator.holders[blocks] > 1
        source = blocks[shared]
        if not len(source):
            return
        target = self.allocator.allocate(len(source))
        self._enter(index[shared], target)
        self.allocator.release(source)
        self._copies.append(BlockCopies(source, target))

    def _num_shared(self, slot: int) -> int:
        return int((self.allocator.holders[self.blocks_of(slot)] > 1).sum())
