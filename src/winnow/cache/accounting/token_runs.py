"""Runs of tokens that the prefix index knows, wherever in another prompt they stood."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from winnow.cache.accounting.prefix_chain import PrefixKey

BlockContent = tuple[PrefixKey, int]
"""Key of a whole block: the root of the salt that may use it, and the hash of its tokens."""
_BASE = 0x9E3779B97F4A7C15
"""Of a polynomial over the tokens of a block, modulo 2^64; odd, so that every power counts."""
_TRIED = 8
"""Blocks of equal tokens, those found last, of which the one with the longest run is taken."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens `start` to `end` - 1 of a prompt, whose KVs lie in the blocks of `keys`, from slot `offset` on."""

    start: int
    end: int
    keys: tuple[PrefixKey, ...]
    offset: int


@dataclass(frozen=True)
class PackedRun:
    """Tokens `start` to `end` - 1 of a prompt, of whose KVs a snapshot has some, behind `skipped` other tokens."""

    start: int
    end: int
    key: PrefixKey
    skipped: int


class TokenRuns:
    """Lookup of whole blocks by their tokens at any offset: by a hash first, then token by token.

    Args:
        tokens_of: returns the tokens of a known key.
        before, following: the neighbours of known keys in their prefixes.
    """

    def __init__(
        self,
        block_size: int,
        tokens_of: Callable[[PrefixKey], tuple[int, ...] | None],
        before: dict[PrefixKey, PrefixKey],
        following: dict[PrefixKey, dict[PrefixKey, None]],
    ) -> None:
        self._size, self._tokens_of = block_size, tokens_of
        self._before, self._following = before, following
        powers = [pow(_BASE, power, 2**64) for power in reversed(range(block_size))]
        self._powers = np.array(powers, dtype=np.uint64)
        self._by_content: dict[BlockContent, dict[PrefixKey, None]] = {}
        self._content_of: dict[PrefixKey, BlockContent] = {}
        self._num_blocks = Counter[PrefixKey]()

    def put(self, key: PrefixKey, root: PrefixKey, token_ids: Sequence[int]) -> None:
        """Let a whole block be found by those who share its `root`, which follows from the salt."""
        content = self._content_of[key] = root, self.hashes(token_ids)[0]
        self._num_blocks[root] += 1
        self._by_content.setdefault(content, {})[key] = None

    def contents(self, keys: Sequence[PrefixKey], root: PrefixKey) -> list[int]:
        """Return the hashes of the first whole blocks of some that are found by a root."""
        known = (self._content_of.get(key, (b"", 0)) for key in keys)
        return [each for _, each in takewhile(lambda content: content[0] == root, known)]

    def drop(self, key: PrefixKey) -> None:
        content = self._content_of.pop(key, None)
        if content is not None:
            self._num_blocks[content[0]] -= 1
            del self._by_content[content][key]
            if not self._by_content[content]:
                del self._by_content[content]

    def find(
        self, least: Mapping[PrefixKey, int], token_ids: Sequence[int], start: int, end: int
    ) -> list[TokenRun]:
        """Return known runs of some roots among tokens start..end - 1, in order: of `least` tokens of each root and of
        a block. Those of the first root alone go before those that need the others too."""
        found: list[TokenRun] = []
        roots = [root for root in least if self._num_blocks[root]]
        if not roots or end - start < self._size:
            return found
        at, hashes = start, self.hashes(token_ids[start:end])
        while at + self._size <= end:
            first = found[-1].end if found else start
            for count, root in enumerate(roots, 1):
                known = list(self._by_content.get((root, hashes[at - start]), ()))[-_TRIED:]
                runs = [self._extend(key, roots[:count], token_ids, at, first, end) for key in known]
                run = max(filter(None, runs), key=lambda r: r.end - r.start, default=None)
                if run is not None and run.end - run.start >= least[root]:
                    found.append(run)
                    at = run.end
                    break
            else:
                at += 1
        return found

    def _extend(
        self,
        key: PrefixKey,
        roots: Sequence[PrefixKey],
        token_ids: Sequence[int],
        at: int,
        first: int,
        end: int,
    ) -> TokenRun | None:
        """Return the longest run within tokens first..end - 1 in which the block stands at `at`, of blocks of some
        roots; None: it is not there."""
        size = self._size
        if self._tokens_of(key) != tuple(token_ids[at : at + size]):
            return None
        keys, start, last = [key], at, at + size
        before = self._before.get(key)
        tokens = None if before is None else self._tokens_of(before)
        if before is not None and self._is_of(before, roots) and tokens is not None and len(tokens) == size:
            common = _common(reversed(tokens), reversed(token_ids[max(first, at - size) : at]))
            if common:
                keys.insert(0, before)
                start -= common
        while last < end:
            wanted = token_ids[last : min(last + size, end)]
            options = [key for key in self._following.get(keys[-1], ()) if self._is_of(key, roots)][-_TRIED:]
            lengths = [_common(self._tokens_of(each) or (), wanted) for each in options]
            common = max(lengths, default=0)
            if common:
                keys.append(options[lengths.index(common)])
                last += common
            if common < size:
                break
        return TokenRun(start, last, tuple(keys), (at - start and size - (at - start)))

    def _is_of(self, key: PrefixKey, roots: Sequence[PrefixKey]) -> bool:
        """Return whether a block is found by some roots; a tail, which no hash finds, is."""
        return key not in self._content_of or self._content_of[key][0] in roots

    def hashes(self, token_ids: Sequence[int]) -> list[int]:
        """Return the hash of as many tokens as a block has, from each of some tokens on."""
        tokens = np.asarray(token_ids, dtype=np.int64).astype(np.uint64) + np.uint64(1)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, self._size)
        found: list[int] = (windows * self._powers).sum(axis=1, dtype=np.uint64).tolist()
        return found


def _common(ours: Iterator[int] | Sequence[int], theirs: Iterator[int] | Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    count = 0
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            break
        count += 1
    return count
