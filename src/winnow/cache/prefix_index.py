"""Which blocks hold the KVs of which prefix, so that a later request with the same prefix need not compute them.

A prefix is a chain of blocks of tokens. Each has a key: SHA-256 over the key before it and the block's token ids. The
first key comes from a salt, so requests share nothing unless they share a salt. For each block of tokens the index
holds the block of every row. What no sequence holds counts as free memory: when blocks run short, the least recently
used prefixes are forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from winnow.cache.allocator import BlockAllocator
from winnow.cache.layout import CacheLayout, IntArray

PrefixKey = bytes


class PrefixChain:
    """The keys of a sequence's whole blocks of tokens, which grow with it.

    Args:
        salt: prefixes are found only under the salt under which they were put.
    """

    def __init__(self, salt: str, block_size: int) -> None:
        self.salt = salt
        self._block_size = block_size
        self._last = sha256(salt.encode()).digest()
        self.links: list[tuple[PrefixKey, tuple[int, ...]]] = []
        """Of each block, its key and its tokens."""

    def fork(self) -> "PrefixChain":
        """A chain of its own for a sequence that begins with the same tokens."""
        child = PrefixChain(self.salt, self._block_size)
        child._last, child.links = self._last, list(self.links)
        return child

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what `token_ids`, which begin with the tokens of before, have more."""
        size = self._block_size
        for start in range(len(self.links) * size, len(token_ids) - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            self._last = sha256(self._last + np.array(tokens, dtype="<i8").tobytes()).digest()
            self.links.append((self._last, tokens))


class _Entry(NamedTuple):
    token_ids: tuple[int, ...]  # the block's own
    blocks: IntArray  # int32 [rows]


class PrefixIndex:
    """Chains of blocks by their tokens.

    Only blocks whose KVs follow from the tokens before them alone may enter: no round has changed them, and no query
    has added to their accumulators.

    Attributes:
        num_asked_tokens: of prompts that were looked up.
        num_hit_tokens: of those, how many were found.
    """

    def __init__(self, layout: CacheLayout, allocator: BlockAllocator) -> None:
        self._layout = layout
        self._allocator = allocator
        allocator.reclaim = self.reclaim
        # Least recently used first. A chain's end stands before its front, and is taken back first.
        self._entries: OrderedDict[PrefixKey, _Entry] = OrderedDict()
        self._key_of: dict[int, PrefixKey] = {}  # by a chain link's block in the first row
        self.num_asked_tokens = self.num_hit_tokens = 0

    def __len__(self) -> int:
        """Blocks of tokens that are known."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Of the blocks that the index holds, whoever else holds them."""
        return len(self._entries) * self._layout.rows_per_seq * self._layout.block_bytes

    def match(self, chain: PrefixChain, limit: int) -> list[PrefixKey]:
        """The keys of the longest known prefix of at most `limit` tokens.

        Tokens are compared: a hash that two prefixes share gives no wrong answer.
        """
        found = []
        for key, tokens in chain.links[: max(limit, 0) // self._layout.block_size]:
            entry = self._entries.get(key)
            if entry is None or entry.token_ids != tokens:
                break
            found.append(key)
        return found

    def hold(self, keys: Sequence[PrefixKey]) -> IntArray:
        """Add a holder to the blocks of a matched prefix. Returns them, int32 [n, rows]."""
        blocks = [self._entries[key].blocks for key in keys]
        self.touch(keys)
        if not blocks:
            return np.empty((0, self._layout.rows_per_seq), dtype=np.int32)
        held = np.stack(blocks)
        self._allocator.share(held.ravel())
        return held

    def put(self, key: PrefixKey, token_ids: tuple[int, ...], blocks: IntArray) -> None:
        """Learn of a block of tokens; no effect if it is known. The index holds its `blocks`, int32 [rows], too."""
        if key not in self._entries:
            self._entries[key] = _Entry(token_ids, blocks)
            self._key_of[int(blocks[0])] = key
            self._allocator.index(blocks)

    def num_held(self, keys: Sequence[PrefixKey]) -> int:
        """Blocks of a matched prefix that sequences hold."""
        blocks = [self._entries[key].blocks for key in keys]
        return int((self._allocator.holders[np.concatenate(blocks)] > 1).sum()) if blocks else 0

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        """The prefix was used."""
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def reclaim(self, num_blocks: int) -> None:
        """Forget prefixes that nobody else holds, until at least `num_blocks` blocks are free again."""
        for partly_used in (False, True):
            for _ in range(len(self._entries)):
                if num_blocks <= 0:
                    return
                key = next(iter(self._entries))
                used = self._allocator.holders[self._entries[key].blocks] > 1
                # Sequences hold no block in rows whose window has passed it, and go on without the index.
                if used.all() if partly_used else used.any():
                    self._entries.move_to_end(key)
                else:
                    num_blocks -= self._forget(key)

    def forget(self, blocks: IntArray) -> None:
        """Forget the prefixes that some of `blocks`, those of the first row of a sequence, are of."""
        for block in blocks.tolist():
            if block in self._key_of:
                self._forget(self._key_of[block])

    def clear(self) -> None:
        """Forget everything."""
        for key in list(self._entries):
            self._forget(key)

    def check_integrity(self) -> None:
        """Assert that the allocator and the index agree on what is held."""
        blocks = [entry.blocks for entry in self._entries.values()]
        held = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int32)
        assert len(np.unique(held)) == len(held), "two prefixes hold a block"
        assert np.array_equal(np.sort(held), np.flatnonzero(self._allocator.indexed)), (
            "a held block is not marked"
        )
        assert len(self._key_of) == len(self._entries), "a prefix is not found by its block"

    def _forget(self, key: PrefixKey) -> int:
        entry = self._entries.pop(key)
        del self._key_of[int(entry.blocks[0])]
        return self._allocator.unindex(entry.blocks)
