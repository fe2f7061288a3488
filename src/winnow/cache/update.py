"""Changes of a ledger, as values that the owner of the memory applies."""

from dataclasses import dataclass, field

import numpy as np

from winnow.cache.layout import IntArray


@dataclass(frozen=True, eq=False)
class BlockCopies:
    """Blocks whose content must be copied before the next KVs are written, int32 [n] each.

    No block is both a source and a target.
    """

    source: IntArray
    target: IntArray


@dataclass(frozen=True, eq=False)
class RowLengths:
    """KVs of the rows of some sequences.

    Attributes:
        slots: int64 [n].
        lengths: int32 [n, layers, heads].
    """

    slots: IntArray
    lengths: IntArray


def _none(dtype: type[np.signedinteger]) -> IntArray:
    return np.empty(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class CacheUpdate:
    """All changes of a ledger since its last update. Applied in the order of the fields."""

    closed: tuple[int, ...] = ()
    """Slots whose sequences have ended or lost their KVs; some may be in use again."""
    copies: tuple[BlockCopies, ...] = ()
    """Made one after the other."""
    entries: IntArray = field(default_factory=lambda: _none(np.int64))
    """Indices of block table entries in the flattened pages, int64 [n]."""
    blocks: IntArray = field(default_factory=lambda: _none(np.int32))
    """What stands there now, int32 [n]."""
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Slots whose table pages changed, each with all of its pages in order."""
    lengths: tuple[RowLengths, ...] = ()
    """Set one after the other; the last one for a slot counts."""
