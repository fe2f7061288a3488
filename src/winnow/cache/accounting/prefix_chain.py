"""NAMES of prefixes: keys of the blocks of a sequence's tokens, each over all tokens before it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from winnow.cache.layout import IntArray

PrefixKey = bytes


class PrefixChain:
    """The keys of a sequence's whole blocks of tokens, which grow with it.

    Args:
        salt: prefixes are found only under the salt under which they were put.
    """

    def __init__(self, salt: str, block_size: int) -> None:
        self.salt = salt
        self._block_size = block_size
        self._seed = root_of(salt)
        self._last = self._seed
        self._parted: tuple[int, PrefixKey] | None = None
        # Key and tokens of each block.
        self.links: list[tuple[PrefixKey, tuple[int, ...]]] = []
        # Numbers of tokens after which other sequences differ, so that a state after them is worth keeping.
        self.branches: set[int] = set()
        # Keys and rules of snapshots that may be there, by number of tokens, most first.
        self.snapshots: dict[int, tuple[PrefixKey, Hashable]] = {}

    def fork(self) -> "PrefixChain":
        child = PrefixChain(self.salt, self._block_size)
        child._last, child.links, child.snapshots = self._last, list(self.links), dict(self.snapshots)
        child._parted = self._parted
        return child

    @property
    def root(self) -> PrefixKey:
        """What all chains of its salt begin with."""
        return self._seed

    @property
    def approximate_root(self) -> PrefixKey:
        """The root of blocks whose KVs were placed, not computed, behind the tokens before them."""
        return _parted_key(self._seed)

    @property
    def is_parted(self) -> bool:
        return self._parted is not None

    def part(self, num_tokens: int) -> None:
        """Give keys that only parted chains have to the block of token `num_tokens` and those behind it: their KVs do
        not follow from the tokens before them alone."""
        whole = num_tokens // self._block_size
        if self._parted is None or whole < self._parted[0]:
            self._last = _parted_key(self.key_after(whole))
            self._parted = whole, self._last
            del self.links[whole:]
            self.snapshots = {}

    def num_exact(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens have KVs that follow from the tokens alone."""
        return num_tokens if self._parted is None else min(num_tokens, self._parted[0] * self._block_size)

    def first_if_parted(self, num_blocks: int) -> PrefixKey:
        """Return the key that the block behind the first blocks would have if the chain parted there."""
        return _digest(_parted_key(self.key_after(num_blocks)), self.links[num_blocks][1])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what `token_ids`, which begin with the tokens of before, have more."""
        size = self._block_size
        for start in range(len(self.links) * size, len(token_ids) - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            self._last = _digest(self._last, tokens)
            self.links.append((self._last, tokens))

    def key_after(self, num_blocks: int) -> PrefixKey:
        if self._parted is not None and num_blocks == self._parted[0]:
            return self._parted[1]
        return self.links[num_blocks - 1][0] if num_blocks else self._seed

    def tail_key(self, token_ids: Sequence[int]) -> PrefixKey:
        whole = len(token_ids) // self._block_size
        return self.tail_key_after(whole, token_ids[whole * self._block_size :])

    def tail_key_after(self, num_blocks: int, tokens: Sequence[int]) -> PrefixKey:
        """Return the key of `tokens`, which fill no block, behind the chain's first blocks."""
        return sha256(b"tail" + _digest(self.key_after(num_blocks), tokens)).digest()

    def document_key(self, token_ids: Sequence[int]) -> PrefixKey:
        return self.snapshot_key(token_ids, b"")

    def snapshot_key(self, token_ids: Sequence[int], rule: bytes) -> PrefixKey:
        """Return the key of the state after `token_ids`, which the chain begins with, under a rule of this digest."""
        whole, length = len(token_ids) // self._block_size, len(token_ids).to_bytes(8, "little")
        state = _digest(self.key_after(whole), token_ids[whole * self._block_size :])
        return sha256(b"snapshot" + state + length + rule).digest()


def root_of(salt: str) -> PrefixKey:
    return sha256(salt.encode(errors="surrogatepass")).digest()


def _parted_key(before: PrefixKey) -> PrefixKey:
    return sha256(b"parted" + before).digest()


def _digest(before: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    return sha256(before + np.array(tokens, dtype="<i8").tobytes()).digest()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The KVs of a sequence right after a round. A sequence that begins with them copies what it changes.

    The blocks count as KV memory. What lies beside them on the host counts nowhere: 8 bytes a token, 4 a row and 4 a
    block, and a sum of each row's keys under scores that use it. A snapshot has at least a block in some row, so
    memory bounds their number.

    Attributes:
        key: `PrefixChain.snapshot_key` of tokens and rule.
        token_ids: int64 [n], all that are computed.
        rule: all that the KVs follow from besides them.
        lengths: int32 [layers, heads], KVs of each row.
        blocks: int32 [m], row by row. No sequence holds those that are partly filled.
        num_rounds: how many rounds the KVs have seen.
    """

    key: PrefixKey
    token_ids: IntArray
    rule: Hashable
    lengths: IntArray
    blocks: IntArray
    num_rounds: int = 1

    @classmethod
    def of(
        cls, key: PrefixKey, token_ids: Sequence[int], rule: Hashable, lengths: IntArray, blocks: IntArray,
        num_rounds: int = 1,
    ) -> "Snapshot":  # fmt: skip
        return cls(key, np.array(token_ids, dtype=np.int64), rule, lengths.copy(), blocks, num_rounds)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PrefixStored:
    """A block of tokens that can be found now, or a compressed prefix.

    Attributes:
        before: the key of the prefix that the tokens follow; None: they are the first.
        salt: under which it is found; "": there is none.
        rule: by which KVs went; None: all are there.
    """

    key: PrefixKey
    before: PrefixKey | None
    token_ids: tuple[int, ...]
    salt: str = ""
    rule: Hashable = None


@dataclass(frozen=True)
class PrefixRemoved:
    """A block of tokens or a compressed prefix that can be found no longer."""

    key: PrefixKey


PrefixEvent = PrefixStored | PrefixRemoved


class PrefixLog:
    """Recorder of events until they are read. Tails, which fill no block, are left out: routers count whole blocks."""

    def __init__(self) -> None:
        self._events: list[PrefixEvent] = []
        self._roots: dict[PrefixKey, str] = {}  # salt of chains, by the key before their first block
        # Key before the first block, of each block that was stored and of each compressed prefix.
        self._root_of: dict[PrefixKey, PrefixKey] = {}

    def name_root(self, root: PrefixKey, salt: str) -> None:
        self._roots[root] = salt

    def store(self, key: PrefixKey, before: PrefixKey, token_ids: tuple[int, ...]) -> None:
        """Record a whole block of tokens, unless its parent is not recorded: no lookup reaches it then."""
        root = before if before in self._roots else self._root_of.get(before)
        if root is not None:
            self._root_of[key] = root
            parent = None if before == root else before
            self._events.append(PrefixStored(key, parent, token_ids, self._roots[root]))

    def store_compressed(self, key: PrefixKey, token_ids: tuple[int, ...], rule: Hashable) -> None:
        """Record a compressed prefix, whose key depends on its salt."""
        self._root_of[key] = key
        self._events.append(PrefixStored(key, None, token_ids, rule=rule))

    def remove(self, key: PrefixKey) -> None:
        if self._root_of.pop(key, None) is not None:
            self._events.append(PrefixRemoved(key))

    def take(self) -> list[PrefixEvent]:
        events, self._events = self._events, []
        return events
