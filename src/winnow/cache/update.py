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


@dataclass(frozen=True, eq=False)
class RowsSaved:
    """Copy of all rows of the sequence in `slot` to host memory, with what else is kept of the sequence.

    Attributes:
        blocks: those of its tables, row by row, int32 [n].
        host_id: the name of the copy, never used twice.
    """

    slot: int
    host_id: int
    blocks: IntArray


@dataclass(frozen=True, eq=False)
class RowsRestored:
    """The blocks of a copy in host memory, in the order in which they were saved, are copied to `blocks`, int32 [n].

    `slot` holds the sequence from now on, with what else was kept of it. The copy stays.
    """

    host_id: int
    slot: int
    blocks: IntArray


@dataclass(frozen=True, eq=False)
class CopyDiscarded:
    """A copy in host memory is not asked for again."""

    host_id: int


@dataclass(frozen=True, eq=False)
class StateSaved:
    """Keep the states (`SlotState`) of the sequence in `slot` under the key of a prefix, for later sequences.

    positions: those of the first tokens that are meant, as a half-open interval; None: all that the sequence has.
    """

    slot: int
    key: bytes
    positions: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class StateRestored:
    """Copy the states kept under these keys to the sequence in `slot`; they stay kept."""

    slot: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class StateDiscarded:
    """States that were kept under a key are not asked for again."""

    key: bytes


Copy = BlockCopies | RowsSaved | RowsRestored | CopyDiscarded | StateSaved | StateRestored | StateDiscarded


def _none(dtype: type[np.signedinteger]) -> IntArray:
    return np.empty(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class CacheUpdate:
    """Changes of a ledger since its last update, applied in the order of the fields."""

    closed: tuple[int, ...] = ()
    """Slots whose sequences have ended or lost their KVs; some may be in use again."""
    copies: tuple[Copy, ...] = ()
    """Made one after the other: a block that is saved may be written by the next copy."""
    entries: IntArray = field(default_factory=lambda: _none(np.int64))
    """Indices of block table entries in the flattened pages, int64 [n]."""
    blocks: IntArray = field(default_factory=lambda: _none(np.int32))
    """Blocks that stand there now, int32 [n]."""
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Slots whose table pages changed, each with all of its pages in order."""
    lengths: tuple[RowLengths, ...] = ()
    """Set one after the other; the last one for a slot counts."""
