"""Index of the blocks that hold the KVs of prefixes, which later requests need not compute again.

A prefix is a chain of blocks of tokens. Each has a key: SHA-256 over the key before it and the block's token ids. The
first key comes from a salt, so requests share nothing unless they share a salt. For each block of tokens the index
holds the block of every row.

A sequence ends within a block: there its chain has a tail. What is known reaches to the last common token: of the block
behind the whole ones, a tail or not, the first tokens may be used in a copy.

Layers that keep a state in place of KVs add that a prefix is of use only where the state after it is kept. That is so
after few blocks, and at the ends of sequences.

Rounds of eviction leave rows of uneven length, which no chain describes. A snapshot holds all of them: the state of a
sequence after a round, under a key of its tokens and of the rule by which KVs went.

What no sequence holds counts as free memory: when blocks run short, the least recently used prefixes are forgotten.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set as AbstractSet
from itertools import islice
from typing import NamedTuple

import numpy as np

from winnow.cache.accounting.allocator import BlockAllocator
from winnow.cache.accounting.prefix_chain import PrefixChain, PrefixKey, PrefixLog, Snapshot
from winnow.cache.accounting.token_runs import TokenRuns
from winnow.cache.layout import CacheLayout, IntArray

_COMPARED = 64
"""Blocks, those found last, that are compared token by token behind the whole ones."""


class PrefixLink(NamedTuple):
    """A known block of tokens."""

    token_ids: tuple[int, ...]
    blocks: IntArray  # int32 [rows]
    resumable: bool  # the states of layers after it are kept


class PrefixIndex:
    """Chains of blocks by their tokens, and snapshots by their tokens and rules.

    Only blocks whose KVs follow from the tokens before them alone may enter a chain: no round has changed them, and no
    query has added to their accumulators. What rounds and queries of the prefix itself, and no others, have changed
    may enter as a snapshot. A block is held by one of all these at most.

    Args:
        state_limit: bytes that states of all prefixes may take (`SlotState`).

    Attributes:
        num_asked_tokens: of prompts that were looked up; num_hit_tokens: how many of them were found.
        num_forgotten: blocks of tokens and snapshots that it no longer holds.
        discard_state: called with a key under which a state was kept, when that is forgotten.
        log: records what is learnt and forgotten; None: nobody asks.
        runs: finds whole blocks by their tokens alone.
    """

    def __init__(self, layout: CacheLayout, allocator: BlockAllocator, state_limit: int = 0) -> None:
        self._layout = layout
        self._allocator = allocator
        self._state_limit = state_limit
        self._state_bytes: dict[PrefixKey, int] = {}
        self._num_state_bytes = 0
        self.discard_state: Callable[[PrefixKey], None] = lambda key: None
        self.log: PrefixLog | None = None
        allocator.reclaim = self.reclaim
        # Least recently used first. A chain's end stands before its front, and is taken back first.
        self._entries: OrderedDict[PrefixKey, PrefixLink | Snapshot] = OrderedDict()
        self._key_of: dict[int, PrefixKey] = {}  # by a chain link's block in the first row
        # Links of chains, by the key before them.
        self._following: dict[PrefixKey, dict[PrefixKey, None]] = {}
        self._before: dict[PrefixKey, PrefixKey] = {}
        self.runs = TokenRuns(layout.block_size, self.tokens_of, self._before, self._following)
        self.snapshots: dict[PrefixKey, Snapshot] = {}
        self._wanted: set[PrefixKey] = set()
        self.num_asked_tokens = self.num_hit_tokens = self.num_forgotten = 0

    def __len__(self) -> int:
        """Return blocks of tokens that are known, and snapshots."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the index holds, alone or with sequences, without keys, tokens and lengths."""
        return self.bytes_of(self._entries)

    def match(self, chain: PrefixChain, limit: int) -> list[PrefixKey]:
        """Return the keys of the longest known prefix of at most `limit` tokens. Tokens are compared, beside hashes."""
        found = []
        for key, tokens in chain.links[: max(limit, 0) // self._layout.block_size]:
            entry = self._entries.get(key)
            if not isinstance(entry, PrefixLink) or entry.token_ids != tokens:
                break
            found.append(key)
        return found

    def longest_resumable(
        self, chain: PrefixChain, known: Sequence[PrefixKey], token_ids: Sequence[int], limit: int
    ) -> list[PrefixKey]:
        """Return the longest prefix of what `match` found, or a tail on it, after which layers' states are kept."""
        size = self._layout.block_size
        for count in range(len(known), -1, -1):
            first = count * size
            tails = [
                (len(tokens), key)
                for key in self._following.get(chain.key_after(count), ())
                if first + len(tokens := self._entries[key].token_ids) <= limit
                and len(tokens) < size
                and tuple(token_ids[first : first + len(tokens)]) == tokens
            ]
            if tails:
                return [*known[:count], max(tails)[1]]
            if count and self._is_resumable(known[count - 1]):
                return list(known[:count])
        return []

    def common_tail(
        self, chain: PrefixChain, known: Sequence[PrefixKey], token_ids: Sequence[int], limit: int
    ) -> tuple[PrefixKey, int] | None:
        """Return the block behind `known` whole ones that shares most tokens with `token_ids`, and their number."""
        first = len(known) * self._layout.block_size
        wanted = token_ids[first : min(first + self._layout.block_size, limit)]
        longest = 0, b""
        for key in islice(reversed(self._following.get(chain.key_after(len(known)), {})), _COMPARED):
            pairs = zip(wanted, self._entries[key].token_ids, strict=False)
            common = next((i for i, (own, other) in enumerate(pairs) if own != other), None)
            if common is None:
                common = min(len(wanted), len(self._entries[key].token_ids))
            longest = max(longest, (common, key))
        return (longest[1], longest[0]) if longest[0] else None

    def num_tokens(self, keys: Sequence[PrefixKey]) -> int:
        """Return tokens of a matched prefix, whose last block alone may be partly filled."""
        if not keys:
            return 0
        return (len(keys) - 1) * self._layout.block_size + len(self._entries[keys[-1]].token_ids)

    def hold(self, keys: Sequence[PrefixKey]) -> IntArray:
        """Add a holder to the blocks of a matched prefix. Returns them, int32 [n, rows]."""
        self.touch(keys)
        if not keys:
            return np.empty((0, self._layout.rows_per_seq), dtype=np.int32)
        held = self.columns(keys)
        self._allocator.share(held.ravel())
        return held

    def put(
        self,
        key: PrefixKey,
        token_ids: tuple[int, ...],
        blocks: IntArray,
        state_bytes: int = 0,
        *,
        resumable: bool = False,
        before: PrefixKey | None = None,
        root: PrefixKey | None = None,
    ) -> bool:
        """Add a block of tokens. The index becomes a holder of its `blocks`, int32 [rows].

        Args:
            state_bytes: of its state, which is kept beside its blocks.
            resumable: with it the states of layers after these tokens; a block that is known without them is put anew.
            before: the key before it, behind which `common_tail` finds it; None: it is found whole alone.
            root: `PrefixChain.root` of the sequences that find a whole block by its tokens (`runs`); None: none does.

        Returns:
            Whether it was new, and there was room for its state.
        """
        if key in self._entries:
            if not resumable or self._is_resumable(key):
                return False
            self.drop(key)
        if not self._count_state(key, state_bytes):
            return False
        if before is not None:
            self._before[key] = before
            self._following.setdefault(before, {})[key] = None
        if self.log is not None and before is not None and len(token_ids) == self._layout.block_size:
            self.log.store(key, before, token_ids)
        if root is not None and len(token_ids) == self._layout.block_size:
            self.runs.put(key, root, token_ids)
        self._entries[key] = PrefixLink(token_ids, blocks, resumable)
        self._key_of[int(blocks[0])] = key
        self._allocator.index(blocks)
        return True

    def knows(self, key: PrefixKey) -> bool:
        return key in self._entries

    def link(self, key: PrefixKey) -> PrefixLink | None:
        entry = self._entries.get(key)
        return entry if isinstance(entry, PrefixLink) else None

    def tokens_of(self, key: PrefixKey) -> tuple[int, ...] | None:
        link = self.link(key)
        return None if link is None else link.token_ids

    def _is_resumable(self, key: PrefixKey) -> bool:
        entry = self._entries[key]
        return isinstance(entry, PrefixLink) and entry.resumable

    def columns(self, keys: Sequence[PrefixKey]) -> IntArray:
        return np.stack([self._entries[key].blocks for key in keys])

    def snapshot(self, key: PrefixKey, token_ids: Sequence[int], rule: Hashable) -> Snapshot | None:
        """Return the snapshot of that key, if it is of these tokens and this rule: both are compared."""
        found = self.snapshots.get(key)
        if found is None or found.rule != rule or not np.array_equal(found.token_ids, token_ids):
            return None
        return found

    def put_snapshot(self, snapshot: Snapshot) -> bool:
        """Add a snapshot that is not in the index. The index becomes a holder of its blocks, of which it held none.
        Returns whether there was room for its state."""
        assert snapshot.key not in self._entries, "a snapshot is put once: ask `knows` first"
        assert not self._allocator.indexed[snapshot.blocks].any(), "two prefixes would hold a block"
        if not self._count_state(snapshot.key, self._layout.prefix_state_bytes(snapshot.num_tokens)):
            return False
        self._entries[snapshot.key] = self.snapshots[snapshot.key] = snapshot
        self._allocator.index(snapshot.blocks)
        if self.log is not None:
            self.log.store_compressed(snapshot.key, tuple(snapshot.token_ids.tolist()), snapshot.rule)
        return True

    def want(self, keys: Iterable[PrefixKey]) -> None:
        """Mark the snapshots of these keys, if in the index, as wanted: they are evicted for room last."""
        self._wanted = self.snapshots.keys() & keys

    def bytes_of(self, keys: Iterable[PrefixKey]) -> int:
        """Return device bytes of the blocks under these keys; keys that are not in the index count 0."""
        blocks = self.blocks_of([key for key in keys if key in self._entries])
        return self._layout.device_bytes(self._allocator.count(blocks))

    def num_wanted(self, without: Collection[PrefixKey]) -> int:
        """Return how many blocks of wanted snapshots, those of the keys `without` excluded, only the index holds."""
        blocks = [self.snapshots[key].blocks for key in self._wanted.difference(without)]
        return sum(int((self._allocator.holders[each] == 1).sum()) for each in blocks)

    def num_held(self, blocks: IntArray) -> int:
        """Return how many of `blocks`, all of which the index holds, sequences hold too."""
        return int((self._allocator.holders[blocks] > 1).sum())

    def blocks_of(self, keys: Sequence[PrefixKey]) -> IntArray:
        blocks = [self._entries[key].blocks for key in keys]
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int32)

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def reclaim(self, enough: Callable[[], bool]) -> None:
        """Forget prefixes that only the index holds, and only then those in use, until `enough` blocks are free again.

        Of a snapshot in use, or where a window has passed, some blocks may be the index's alone.
        """
        none = frozenset[PrefixKey]()
        spare: list[AbstractSet[PrefixKey]] = [self._wanted, none, none]
        for number, spared in enumerate(spare):
            in_use = number == 2
            for _ in range(len(self._entries)):
                if enough():
                    return
                key = next(iter(self._entries))
                holders = self._allocator.holders[self._entries[key].blocks]
                if key not in spared and ((holders == 1).any() if in_use else (holders == 1).all()):
                    self.drop(key)
                else:
                    self._entries.move_to_end(key)

    def forget(self, blocks: IntArray) -> None:
        """Remove every prefix of which `blocks`, all blocks of a sequence, include one."""
        keys = {self._key_of[block] for block in blocks.tolist() if block in self._key_of}
        mine = np.zeros(self._allocator.num_blocks, dtype=np.bool_)
        mine[blocks] = True
        keys.update(key for key, snapshot in self.snapshots.items() if mine[snapshot.blocks].any())
        for key in keys:
            self.drop(key)

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    def check_integrity(self) -> None:
        held, marked = self.blocks_of([*self._entries]), np.flatnonzero(self._allocator.indexed)
        assert len(np.unique(held)) == len(held), "two prefixes hold a block"
        assert np.array_equal(np.sort(held), marked), "a held block is not marked"
        counted = sum(self._state_bytes.values())
        assert self._num_state_bytes == counted <= self._state_limit, "states are miscounted"
        assert self._state_bytes.keys() <= self._entries.keys(), "a state is kept of no prefix"
        resumable = set(filter(self._is_resumable, self._entries))
        assert resumable <= self._state_bytes.keys(), "the state after a prefix is not counted"
        found = len(self._key_of) + len(self.snapshots)
        assert found == len(self._entries), "a prefix is not found by its block"

    def _count_state(self, key: PrefixKey, nbytes: int) -> bool:
        """Count the state of a new prefix, and forget others until it has room. False: it is too large."""
        if nbytes > self._state_limit:
            return False
        while self._num_state_bytes + nbytes > self._state_limit:
            self._drop_state(next(key for key in self._entries if key in self._state_bytes))
        if nbytes:
            self._state_bytes[key] = nbytes
            self._num_state_bytes += nbytes
        return True

    def _drop_state(self, key: PrefixKey) -> None:
        """Forget a state, and with it the prefix, unless later states need its blocks."""
        entry = self._entries[key]
        is_tail = len(entry.token_ids) < self._layout.block_size
        if isinstance(entry, PrefixLink) and entry.resumable and not is_tail and not self._layout.wide.any:
            self._entries[key] = entry._replace(resumable=False)
            self._discard(key)
        else:
            self.drop(key)

    def _discard(self, key: PrefixKey) -> None:
        if key in self._state_bytes:
            self._num_state_bytes -= self._state_bytes.pop(key)
            self.discard_state(key)

    def drop(self, key: PrefixKey) -> None:
        entry = self._entries.pop(key)
        if self.log is not None:
            self.log.remove(key)
        self.num_forgotten += 1
        self._discard(key)
        self.runs.drop(key)
        if (before := self._before.pop(key, None)) is not None:
            del self._following[before][key]
            if not self._following[before]:
                del self._following[before]
        self._wanted.discard(key)
        if self.snapshots.pop(key, None) is None:
            del self._key_of[int(entry.blocks[0])]
        else:
            self.discard_state(key)  # also what counts nowhere
        self._allocator.unindex(entry.blocks)
