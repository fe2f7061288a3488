"""NAMES of prefixes: keys of the blocks of a sequence's tokens, each over all tokens before it."""

from collections.abc import Hashable, Sequence
from hashlib import sha256

import numpy as np

PrefixKey = bytes


class PrefixChain:
    """The keys of a sequence's whole blocks of tokens, which grow with it.

    Args:
        salt: prefixes are found only under the salt under which they were put.
    """

    def __init__(self, salt: str, block_size: int) -> None:
        self.salt = salt
        self._block_size = block_size
        self._seed = sha256(salt.encode(errors="surrogatepass")).digest()
        self._last = self._seed
        self.links: list[tuple[PrefixKey, tuple[int, ...]]] = []
        """Key and tokens of each block."""
        self.branches: set[int] = set()
        """Numbers of tokens after which other sequences differ, so that a state after them is worth keeping."""
        self.snapshots: dict[int, tuple[PrefixKey, Hashable]] = {}
        """Keys and rules of snapshots that may be there, by number of tokens, most first."""
        self.earlier: list[tuple[PrefixKey, Hashable]] = []
        """The same of those that a round may compress once more, what the last round left first."""

    def fork(self) -> "PrefixChain":
        """Return a chain of its own for a sequence that begins with the same tokens."""
        child = PrefixChain(self.salt, self._block_size)
        child._last, child.links, child.snapshots = self._last, list(self.links), dict(self.snapshots)
        child.earlier = list(self.earlier)
        return child

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what `token_ids`, which begin with the tokens of before, have more."""
        size = self._block_size
        for start in range(len(self.links) * size, len(token_ids) - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            self._last = _digest(self._last, tokens)
            self.links.append((self._last, tokens))

    def key_after(self, num_blocks: int) -> PrefixKey:
        return self.links[num_blocks - 1][0] if num_blocks else self._seed

    def tail_key(self, token_ids: Sequence[int]) -> PrefixKey:
        """Return the key of the tokens of `token_ids` that fill no block, behind those that do."""
        whole = len(token_ids) // self._block_size
        return self.tail_key_after(whole, token_ids[whole * self._block_size :])

    def tail_key_after(self, num_blocks: int, tokens: Sequence[int]) -> PrefixKey:
        """Return the key of `tokens`, which fill no block, behind the chain's first blocks."""
        return sha256(b"tail" + _digest(self.key_after(num_blocks), tokens)).digest()

    def document_key(self, token_ids: Sequence[int]) -> PrefixKey:
        """Return the key of `token_ids`, which the chain begins with, under any rule."""
        return self.snapshot_key(token_ids, b"")

    def snapshot_key(self, token_ids: Sequence[int], rule: bytes) -> PrefixKey:
        """Return the key of the state after `token_ids`, which the chain begins with, under a rule of this digest."""
        length = len(token_ids).to_bytes(8, "little")
        return sha256(b"snapshot" + self._digest_of(token_ids) + length + rule).digest()

    def _digest_of(self, token_ids: Sequence[int]) -> PrefixKey:
        whole = len(token_ids) // self._block_size
        return _digest(self.key_after(whole), token_ids[whole * self._block_size :])


def _digest(before: PrefixKey, tokens: Sequence[int]) -> PrefixKey:
    return sha256(before + np.array(tokens, dtype="<i8").tobytes()).digest()
