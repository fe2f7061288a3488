"""The accounting of the cache: who holds how much, what is free, what the next step will take.

It moves no KVs and knows no model, so the scheduler and the simulator run it as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.allocator import BlockAllocator, OutOfBlocksError
from winnow.cache.layout import CacheLayout, CacheSize, IntArray
from winnow.cache.tables import BlockTables


class Demand(NamedTuple):
    """What appending would take, at most: a shared tail counts as copied."""

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


@dataclass(frozen=True)
class BlockCopies:
    """Blocks whose content must be copied before the step writes: int32 [n] each."""

    source: Tensor
    target: Tensor


class CacheManager:
    """Sequences in slots, their rows' lengths and blocks.

    A sequence is named by its slot, 0 <= slot < max_num_seqs. Its rows (one per layer and head) have tables and
    lengths of their own. Lengths change only here, by known amounts, so the host's mirror is exact without asking
    the device.

    Attributes:
        lengths: int32 [max_num_seqs, layers, heads], KVs of each row, on the compute device.
        host_lengths: the same as a numpy array; on a CPU it is the same memory.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.size = size
        self.allocator = BlockAllocator(size.num_blocks, device)
        self.tables = BlockTables(layout, size, device)
        shape = (size.max_num_seqs, layout.num_layers, layout.num_kv_heads)
        self.host_lengths = np.zeros(shape, dtype=np.int32)
        self.lengths = torch.from_numpy(self.host_lengths).to(device)
        self.peak_blocks = 0
        self._free_slots = list(range(size.max_num_seqs))[::-1]
        # Slots that took part in a fork. The first kind may hold blocks with other holders; the second kind may
        # have such a block at the tail of a row, where the next KV would be written.
        self._sharing: set[int] = set()
        self._shared_tail: set[int] = set()

    # -- how much ------------------------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def table_bytes(self) -> int:
        """Everything but the blocks themselves: tables, lengths, free stack, reference counts."""
        # On a CPU lengths are one memory, counted as on any device: what fits does not depend on where.
        lengths = self.lengths.nbytes + self.host_lengths.nbytes
        return self.allocator.nbytes + self.tables.nbytes + lengths

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks in use, and of all tables."""
        return self.allocator.num_used * self.layout.block_bytes + self.table_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * self.layout.block_bytes + self.table_bytes

    @property
    def capacity(self) -> int:
        """KVs in every row of a sequence that has the cache for itself."""
        return self.layout.block_size * (self.size.num_blocks // self.layout.rows_per_seq)

    def demand(self, slots: Sequence[int], counts: Sequence[int]) -> Demand:
        """What `append` would take. No device is asked."""
        return self._growth(slots, counts).demand if slots else Demand()

    def has_room_for(self, demand: Demand) -> bool:
        return demand.blocks <= self.allocator.num_free and demand.pages <= self.tables.num_free_pages

    def can_open(self, num_kvs: int) -> bool:
        """Whether there are a slot and table pages for a new sequence of `num_kvs` KVs a row; blocks are not asked.

        Sequences that share blocks have tables of their own, so pages can be short where blocks are not. One sequence
        alone never lacks pages (`CacheSize.of_blocks`), so an expected row beyond all of them asks for all.
        """
        pages = min(self.layout.pages_for(num_kvs), self.size.num_pages)
        return bool(self._free_slots) and pages <= self.tables.num_free_pages

    def blocks_held(self, slot: int) -> int:
        """Blocks in the tables of a sequence, shared ones included."""
        return int(-(-self.host_lengths[slot] // self.layout.block_size).sum())

    # -- the life of a sequence ----------------------------------------------------------------------------------

    def open(self) -> int:
        """Take a slot for a new, empty sequence. The caller has checked `num_free_slots`."""
        return self._free_slots.pop()

    def append(self, slots: Sequence[int], counts: Sequence[int]) -> BlockCopies | None:
        """Lengthen every row of sequence `slots[i]` by `counts[i]` KVs and find the blocks for them.

        Returns:
            Copies that must be made before the new KVs are written (copy-on-write), or None.

        Raises:
            OutOfBlocksError: there is no room for `demand`; nothing has changed.
        """
        growth = self._growth(slots, counts)
        if not self.has_room_for(growth.demand):
            raise OutOfBlocksError(f"no room for {list(counts)} KVs a row in slots {list(slots)}")
        copies = [copy for slot in self._shared_tail.intersection(slots) if (copy := self._own_tail(slot))]
        if growth.demand.pages:
            self.tables.grow(growth.slots, growth.pages)
        self._fill(growth)
        self.host_lengths[growth.slots] = growth.lengths
        self._mirror_lengths(growth.slots)
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)
        if not copies:
            return None
        return BlockCopies(torch.cat([c.source for c in copies]), torch.cat([c.target for c in copies]))

    def can_fork(self, slot: int) -> bool:
        return bool(self._free_slots) and len(self.tables.page_ids(slot)) <= self.tables.num_free_pages

    def fork(self, slot: int) -> int:
        """A new sequence that holds the same blocks. Whoever writes first into a shared block copies it."""
        child = self.open()
        self.share(slot, child)
        return child

    def share(self, slot: int, child: int) -> None:
        """Let `child`, open and empty, hold the blocks of `slot` too."""
        children = np.array([child], dtype=np.int64)
        self.tables.grow(children, np.array([len(self.tables.page_ids(slot))], dtype=np.int64))
        self.tables.copy(slot, child)
        self.host_lengths[child] = self.host_lengths[slot]
        self._mirror_lengths(children)
        self.allocator.share(self.blocks_of(child))
        self._sharing |= {slot, child}
        self._shared_tail |= {slot, child}

    @property
    def any_shared(self) -> bool:
        """Whether any two sequences may hold a block together."""
        return bool(self._sharing)

    def is_shared(self, slot: int) -> bool:
        """Whether another sequence may hold a block of this one."""
        return slot in self._sharing

    def can_own(self, slot: int) -> bool:
        """Whether `own` would find blocks for its copies. Asks the device if the sequence was ever forked."""
        return slot not in self._sharing or self._num_shared(slot) <= self.allocator.num_free

    def own(self, slot: int) -> BlockCopies | None:
        """Replace all blocks that have other holders by copies, which the caller must make at once.

        Raises:
            OutOfBlocksError: `can_own` is False; nothing has changed.
        """
        if slot not in self._sharing:
            return None
        copies = self._copy_shared(slot, np.zeros_like(self.host_lengths[slot]))
        self._sharing.discard(slot)
        self._shared_tail.discard(slot)
        self.peak_blocks = max(self.peak_blocks, self.allocator.num_used)
        return copies

    def shrink(self, slots: Sequence[int], lengths: IntArray) -> int:
        """Cut rows to `lengths`, [B, layers, heads], none above what they hold. Returns how many blocks are free now.

        What the rows keep has been moved to their front. Blocks and table pages past it are given back.
        """
        slot_array = np.asarray(slots, dtype=np.int64)
        held = self.host_lengths[slot_array]
        assert (lengths <= held).all(), "a row cannot shrink to more than it holds"
        have, keep = -(-held // self.layout.block_size), -(-lengths // self.layout.block_size)
        free = self.allocator.num_free
        exclusive = not self._sharing.intersection(slots)
        self.allocator.release(self._entries(slot_array, keep, have), exclusive=exclusive)
        self.host_lengths[slot_array] = lengths
        self._mirror_lengths(slot_array)
        for slot, most in zip(slots, keep.max(axis=(1, 2)).tolist(), strict=True):
            self.tables.trim(slot, most)
        return self.allocator.num_free - free

    def clear(self, slot: int) -> None:
        """Empty a sequence, which stays open: its blocks lose a holder, its pages are free."""
        self.allocator.release(self.blocks_of(slot), exclusive=slot not in self._sharing)
        self.tables.trim(slot, 0)
        self.host_lengths[slot] = 0
        self._mirror_lengths(np.array([slot], dtype=np.int64))
        self._sharing.discard(slot)
        self._shared_tail.discard(slot)

    def close(self, slot: int) -> None:
        """End a sequence: empty it, and its slot is free."""
        self.clear(slot)
        self._free_slots.append(slot)

    def blocks_of(self, slot: int) -> Tensor:
        """The ids of all blocks in the tables of a sequence, int32 [n], row by row."""
        num_blocks = -(-self.host_lengths[slot] // self.layout.block_size)
        return self._entries(np.array([slot]), np.zeros_like(num_blocks)[None], num_blocks[None])

    # -- invariants ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Assert what must hold between steps. Reads everything back from the device."""
        open_slots = np.setdiff1d(np.arange(self.size.max_num_seqs), self._free_slots)
        assert len(open_slots) + len(self._free_slots) == self.size.max_num_seqs, "a slot is free twice"
        num_blocks = -(-self.host_lengths[open_slots] // self.layout.block_size)
        blocks = self._entries(open_slots, np.zeros_like(num_blocks), num_blocks).cpu().numpy()
        owners = np.repeat(open_slots, num_blocks.sum(axis=(1, 2)))
        holdings = np.sort(owners * self.size.num_blocks + blocks)
        twice = holdings[1:][holdings[1:] == holdings[:-1]] // self.size.num_blocks
        assert not len(twice), f"slot {twice[0]} holds a block twice"
        holders = np.bincount(blocks, minlength=self.size.num_blocks)
        unknowing = set(owners[holders[blocks] > 1].tolist()) - self._sharing
        assert not unknowing, f"slots {unknowing} share blocks unknowingly"
        self.allocator.check_integrity(torch.from_numpy(holders).to(self.allocator.ref_count.device))
        self.tables.check_integrity()
        assert np.array_equal(self.lengths.cpu().numpy(), self.host_lengths), (
            "lengths differ from the host's mirror"
        )
        assert not self.host_lengths[self._free_slots].any(), "a free slot has a length"

    # -- inside --------------------------------------------------------------------------------------------------

    def _growth(self, slots: Sequence[int], counts: Sequence[int]) -> _Growth:
        """What appending would do."""
        slot_array, size = np.asarray(slots, dtype=np.int64), self.layout.block_size
        before = self.host_lengths[slot_array]
        after = before + np.asarray(counts, dtype=np.int32)[:, None, None]
        have, want = -(-before // size), -(-after // size)
        shared = self._shared_tail.intersection(slots)
        copied = sum(int(self._partial_rows(slot).sum()) for slot in shared)
        pages = self.tables.pages_missing(slot_array, want.max(axis=(1, 2)))
        num_blocks = int((want - have).sum())
        demand = Demand(num_blocks + copied, int(pages.sum()))
        return _Growth(slot_array, after, have, want, num_blocks, pages, demand)

    def _partial_rows(self, slot: int) -> NDArray[np.bool_]:
        """Rows whose last block has room, [layers, heads]."""
        return self.host_lengths[slot] % self.layout.block_size != 0

    def _entry_index(self, slots: IntArray, first: IntArray, last: IntArray) -> Tensor:
        """Indices of the table entries first <= j < last of each row of the slots [B], int64 [n], row by row.

        first, last: [B, layers, heads].
        """
        counts = (last - first).ravel()
        rows = np.repeat(np.arange(counts.size), counts)
        blocks = np.arange(rows.size) + np.repeat(first.ravel() - (np.cumsum(counts) - counts), counts)
        sequences = rows // self.layout.rows_per_seq
        return self.tables.entry_index(slots[sequences], rows - sequences * self.layout.rows_per_seq, blocks)

    def _entries(self, slots: IntArray, first: IntArray, last: IntArray) -> Tensor:
        return self.tables.pages.view(-1)[self._entry_index(slots, first, last)]

    def _fill(self, growth: _Growth) -> None:
        """Allocate the blocks that rows lack and enter them into the tables."""
        if growth.num_blocks:
            index = self._entry_index(growth.slots, growth.have, growth.want)
            self.tables.pages.view(-1)[index] = self.allocator.allocate(growth.num_blocks)

    def _own_tail(self, slot: int) -> BlockCopies | None:
        """Copy-on-write: replace the shared, partly filled last blocks of a sequence by copies of its own."""
        self._shared_tail.discard(slot)
        return self._copy_shared(slot, self.host_lengths[slot] // self.layout.block_size)

    def _copy_shared(self, slot: int, first: IntArray) -> BlockCopies | None:
        """Replace the shared ones among the blocks from `first`, [layers, heads], on by copies."""
        last = -(-self.host_lengths[slot] // self.layout.block_size)
        index = self._entry_index(np.array([slot]), first[None], last[None])
        blocks = self.tables.pages.view(-1)[index]
        shared = self.allocator.ref_count[blocks] > 1
        source = blocks[shared]
        if not len(source):
            return None
        target = self.allocator.allocate(len(source))
        self.tables.pages.view(-1)[index[shared]] = target
        self.allocator.release(source)
        return BlockCopies(source, target)

    def _num_shared(self, slot: int) -> int:
        return int((self.allocator.ref_count[self.blocks_of(slot)] > 1).sum())

    def _mirror_lengths(self, slots: IntArray) -> None:
        if self.lengths.device.type == "cpu":
            return  # they are the mirror
        self.lengths[torch.from_numpy(slots)] = torch.from_numpy(self.host_lengths[slots]).to(
            self.lengths.device
        )
