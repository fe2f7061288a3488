"""Sequences that begin with blocks that the prefix index holds, and what they leave to it."""

from collections.abc import Hashable, Sequence

import numpy as np

from winnow.cache.allocator import OutOfBlocksError
from winnow.cache.layout import BlockCount, IntArray
from winnow.cache.prefix_index import PrefixIndex, PrefixKey, Snapshot
from winnow.cache.row_tables import RowTables
from winnow.cache.shared_blocks import SharedBlocks
from winnow.cache.update import BlockCopies


class PrefixRows:
    """Moves blocks between the rows of sequences and the index, by sharing them."""

    def __init__(self, rows: RowTables, shared: SharedBlocks, index: PrefixIndex) -> None:
        self._rows = rows
        self._shared = shared
        self._index = index

    # -- into rows -----------------------------------------------------------------------------------------------

    def adopt(self, slot: int, keys: Sequence[PrefixKey]) -> None:
        """Let an open, empty sequence begin with the blocks of a known prefix.

        Raises:
            OutOfBlocksError: there are not enough table pages; nothing has changed.
        """
        rows = self._rows
        if not keys:
            return
        assert not rows.reserved[slot], "what is reserved is not shared"
        lengths = np.full_like(rows.lengths[slot], len(keys) * rows.layout.block_size)
        self._require_pages(slot, lengths)
        rows.hold(slot, lengths, self._index.hold(keys).T.ravel())
        self._shared.add(slot)

    def resume(self, slot: int, snapshot: Snapshot) -> None:
        """Let an open, empty sequence begin with a known snapshot, with copies of the partly filled blocks.

        Raises:
            OutOfBlocksError: there are not enough table pages; nothing has changed.
        """
        rows, allocator = self._rows, self._rows.allocator
        self._require_pages(slot, snapshot.lengths)
        blocks, tails = snapshot.blocks.copy(), rows.layout.partly_filled(snapshot.lengths)
        source = blocks[tails]
        self._index.touch([snapshot.key])
        allocator.share(blocks)
        if not allocator.has(allocator.count(source)):
            self._index.drop_snapshot(snapshot)  # so that the sequence has these blocks for itself
        elif len(source):
            blocks[tails] = target = allocator.allocate_like(source)
            allocator.release(source)
            rows.changes.copies.append(BlockCopies(source, target))
        rows.hold(slot, snapshot.lengths, blocks)
        self._shared.add(slot)

    def has_pages_for(self, snapshot: Snapshot) -> bool:
        """Whether a new sequence finds table pages for the rows of a snapshot."""
        return self._rows.layout.pages_for(int(snapshot.lengths.max())) <= self._rows.pages.num_free

    # -- out of rows ---------------------------------------------------------------------------------------------

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
        lengths = self._rows.lengths[[slot]]
        computed = lengths.max() if num_computed is None else num_computed
        first = index - (computed - lengths) // self._rows.layout.block_size
        self._index.put(key, token_ids, self._rows.blocks([slot], first, first + 1))
        self._shared.add(slot)

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
        rows, allocator = self._rows, self._rows.allocator
        if self._index.knows(key):
            self._index.touch([key])
            return
        lengths = rows.lengths[slot]
        blocks, tails = rows.blocks_of(slot), rows.layout.partly_filled(lengths)
        source = blocks[tails]
        if not allocator.has(allocator.count(source)):
            return
        if len(source):
            blocks[tails] = target = allocator.allocate_like(source)
            rows.changes.copies.append(BlockCopies(source, target))
        snapshot = Snapshot.of(key, token_ids, rule, lengths, blocks, num_rounds, position_offset)
        self._index.put_snapshot(snapshot)
        allocator.release(blocks[tails])
        self._shared.add(slot)

    # -- from elsewhere ------------------------------------------------------------------------------------------

    def take_blocks_for(self, lengths: IntArray) -> IntArray | None:
        """Blocks for rows of `lengths` KVs, [layers, heads], that come from elsewhere.

        They go to `keep_snapshot`, or back to the allocator.

        Returns:
            int32 [n]; None: memory lacks.
        """
        layout, allocator = self._rows.layout, self._rows.allocator
        num_blocks = layout.row_blocks(lengths)
        count, far = int(num_blocks.sum()), layout.far_rows(num_blocks[None])
        num_far = 0 if far is None else int(far.sum())
        return allocator.allocate(count, far) if allocator.has(BlockCount(count - num_far, num_far)) else None

    def keep_snapshot(self, snapshot: Snapshot) -> None:
        """Let the index alone hold a snapshot whose blocks `take_blocks_for` gave, and which are filled now."""
        self._index.put_snapshot(snapshot)
        self._rows.allocator.release(snapshot.blocks)

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_pages(self, slot: int, lengths: IntArray) -> None:
        assert not self._rows.lengths[slot].any(), "only an empty sequence begins with a prefix"
        if not self._rows.has_pages_for(slot, lengths):
            raise OutOfBlocksError(f"no table pages for rows of up to {lengths.max()} KVs in slot {slot}")
