"""Sequences that begin with blocks that the prefix index holds, and what they leave to it."""

from collections.abc import Hashable, Sequence

from winnow.cache.accounting.allocator import OutOfBlocksError
from winnow.cache.accounting.prefix_chain import PrefixKey, Snapshot
from winnow.cache.accounting.prefix_index import PrefixIndex
from winnow.cache.accounting.row_tables import RowTables
from winnow.cache.accounting.shared_blocks import SharedBlocks
from winnow.cache.layout import IntArray
from winnow.cache.update import BlockCopies, StateDiscarded, StateRestored, StateSaved


class PrefixRows:
    """Mover of blocks between the rows of sequences and the index, by sharing them."""

    def __init__(self, rows: RowTables, shared: SharedBlocks, index: PrefixIndex) -> None:
        self._rows = rows
        self._shared = shared
        self._index = index
        index.discard_state = lambda key: rows.changes.copies.append(StateDiscarded(key))

    # -- into rows -----------------------------------------------------------------------------------------------

    def adopt(self, slot: int, keys: Sequence[PrefixKey], num_tokens: int | None = None) -> None:
        """Give an open, empty sequence the blocks of a known prefix, of which it takes `num_tokens` tokens; None: all.

        A partly filled last block is copied. Raises OutOfBlocksError: there are not enough table pages; nothing has
        changed.
        """
        rows = self._rows
        if not keys:
            return
        assert not rows.reserved[slot], "what is reserved is not shared"
        lengths = rows.layout.even_rows(self._index.num_tokens(keys) if num_tokens is None else num_tokens)
        self._require_pages(slot, lengths)
        if rows.layout.prefix_state_bytes(1):
            rows.changes.copies.append(StateRestored(slot, tuple(keys)))
        self._begin(slot, lengths, self._index.hold(keys).T.ravel(), keys)

    def resume(self, slot: int, snapshot: Snapshot) -> None:
        """Give an open, empty sequence the blocks of a known snapshot. Partly filled blocks are copied. Raises
        OutOfBlocksError: there are not enough table pages; nothing has changed."""
        self._require_pages(slot, snapshot.lengths)
        self._index.touch([snapshot.key])
        self._rows.allocator.share(snapshot.blocks)
        self._rows.changes.copies.append(StateRestored(slot, (snapshot.key,)))
        self._begin(slot, snapshot.lengths, snapshot.blocks.copy(), [snapshot.key])

    def _begin(self, slot: int, lengths: IntArray, blocks: IntArray, keys: Sequence[PrefixKey]) -> None:
        """Fill the rows of a sequence with shared blocks of the prefix `keys`, copying partly filled ones."""
        rows, allocator = self._rows, self._rows.allocator
        tails = rows.layout.partly_filled(lengths)
        source = blocks[tails]
        if not allocator.has(allocator.count(source)):
            self._index.drop(keys[-1])  # so that the sequence has these blocks for itself
            rows.hold(slot, lengths, blocks)
            self._shared.add_with_tail(slot)
            return
        if len(source):
            blocks[tails] = target = allocator.allocate_like(source)
            allocator.release(source)
            rows.changes.copies.append(BlockCopies(source, target))
        rows.hold(slot, lengths, blocks)
        self._shared.add(slot)

    def has_pages_for(self, snapshot: Snapshot) -> bool:
        return self._rows.layout.pages_for(int(snapshot.lengths.max())) <= self._rows.pages.num_free

    # -- out of rows ---------------------------------------------------------------------------------------------

    def remember(
        self,
        slot: int,
        index: int,
        key: PrefixKey,
        token_ids: tuple[int, ...],
        num_computed: int | None = None,
        *,
        resumable: bool = False,
        before: PrefixKey | None = None,
        root: PrefixKey | None = None,
    ) -> None:
        """Add block `index` of a sequence's rows, counted from its first token, to the index, as `PrefixIndex.put`.

        Args:
            num_computed: tokens of the sequence that its rows end with; None: as many as the longest row has.
        """
        lengths = self._rows.lengths[[slot]]
        computed = lengths.max() if num_computed is None else num_computed
        size, has_row = self._rows.layout.block_size, self._rows.layout.has_row
        # Rows may have room for tokens that are not computed yet.
        first = (index - (computed - lengths).clip(min=0) // size) * has_row
        positions = index * size, index * size + len(token_ids)
        resumable = resumable and self._rows.layout.state_bytes > 0
        state_bytes = self._rows.layout.link_state_bytes(*positions, resumable=resumable)
        blocks = self._rows.blocks([slot], first, first + has_row)
        is_new = self._index.put(
            key, token_ids, blocks, state_bytes, resumable=resumable, before=before, root=root
        )
        if is_new and state_bytes:
            self._rows.changes.copies.append(StateSaved(slot, key, positions))
        self._shared.add(slot)

    def take_snapshot(
        self, slot: int, key: PrefixKey, token_ids: Sequence[int], rule: Hashable, num_rounds: int = 1
    ) -> None:
        """Add the rows of a sequence as they are to the index: the compressed state of `token_ids`.

        The index gets copies of partly filled blocks, since the sequence continues to fill them. No effect if memory
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
        snapshot = Snapshot.of(key, token_ids, rule, lengths, blocks, num_rounds)
        if self._index.put_snapshot(snapshot):
            rows.changes.copies.append(StateSaved(slot, key))
        allocator.release(blocks[tails])
        self._shared.add(slot)

    # -- from elsewhere ------------------------------------------------------------------------------------------

    def take_blocks_for(self, lengths: IntArray) -> IntArray | None:
        """Return blocks, int32 [n], for rows of `lengths` KVs, [layers, heads], from elsewhere; None: memory lacks.

        They go to `keep_snapshot` or `keep_run`, or back to the allocator.
        """
        layout, allocator = self._rows.layout, self._rows.allocator
        num_blocks = layout.row_blocks(lengths)
        count = layout.by_kind(num_blocks)
        if not allocator.has(count):
            return None
        return allocator.allocate(count.total, layout.kinds_of(num_blocks[None]))

    def keep_snapshot(self, snapshot: Snapshot) -> bool:
        """Add a snapshot to the index, whose filled blocks came from `take_blocks_for`; the index is their only holder.
        Returns whether there was room for its state; else its blocks are free again."""
        is_known = self._index.put_snapshot(snapshot)
        self._rows.allocator.release(snapshot.blocks)
        return is_known

    def keep_run(
        self,
        first: int,
        before: PrefixKey,
        links: Sequence[tuple[PrefixKey, tuple[int, ...], bool]],
        blocks: IntArray,
        root: PrefixKey | None = None,
    ) -> list[PrefixKey]:
        """Add blocks of consecutive tokens to the index, their only holder.

        Args:
            first: number of the first of them in its prefix, whose key `before` is that of the prefix before them.
            links: key, tokens and whether the states of layers after it come along, of each.
            blocks: as `take_blocks_for` gave them, and filled now.
            root: as `PrefixIndex.put`.

        Returns:
            Keys of those that were not known, and for whose states there was room.
        """
        kept, layout = [], self._rows.layout
        columns = blocks.reshape(-1, len(links))
        for number, (key, token_ids, resumable) in enumerate(links):
            start = (first + number) * layout.block_size
            state_bytes = layout.link_state_bytes(start, start + len(token_ids), resumable=resumable)
            column = columns[:, number].copy()
            if self._index.put(
                key, token_ids, column, state_bytes, resumable=resumable, before=before, root=root
            ):
                kept.append(key)
            before = key
        self._rows.allocator.release(blocks)
        return kept

    # -- inside --------------------------------------------------------------------------------------------------

    def _require_pages(self, slot: int, lengths: IntArray) -> None:
        assert not self._rows.lengths[slot].any(), "only an empty sequence begins with a prefix"
        if not self._rows.has_pages_for(slot, lengths):
            raise OutOfBlocksError(f"no table pages for rows of up to {lengths.max()} KVs in slot {slot}")
