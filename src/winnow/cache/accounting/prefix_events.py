"""WHAT the prefix index has learnt and forgotten, for those who route requests by it."""

from collections.abc import Hashable
from dataclasses import dataclass

from winnow.cache.accounting.prefix_chain import PrefixKey


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
    """Recorder of events until somebody takes them.

    Tails, which fill no block, are left out: who routes counts whole blocks.
    """

    def __init__(self) -> None:
        self._events: list[PrefixEvent] = []
        self._roots: dict[PrefixKey, str] = {}
        """Salt of chains, by the key before their first block."""
        self._root_of: dict[PrefixKey, PrefixKey] = {}
        """Key before the first block, of each block that was stored and of each compressed prefix."""

    def name_root(self, root: PrefixKey, salt: str) -> None:
        """Record the `salt` of the chains that begin with the key `root`."""
        self._roots[root] = salt

    def store(self, key: PrefixKey, before: PrefixKey, token_ids: tuple[int, ...]) -> None:
        """Record a whole block of tokens. Without effect if its parent is not recorded, since no lookup reaches it
        then.
        """
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
        """Record that a key is found no longer."""
        if self._root_of.pop(key, None) is not None:
            self._events.append(PrefixRemoved(key))

    def take(self) -> list[PrefixEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
