"""Changes of a ledger, as values that the owner of the memory applies."""

from dataclasses import dataclass, field

import numpy as np

from winnow.cache.layout import IntArray


@dataclass(frozen=True, eq=False)
class BlockCopies:
    """Blocks to be copied before the next KVs are written, int32 [n] each; none is both a source and a target."""

    source: IntArray
    target: IntArray


@dataclass(frozen=True, eq=False)
class RowLengths:
    """KVs, int32 [n, layers, heads], of the rows of sequences in slots int64 [n]."""

    slots: IntArray
    lengths: IntArray


@dataclass(frozen=True, eq=False)
class RowsSaved:
    """Copy of the sequence in `slot`, whose tables have `blocks`, int32 [n], row by row, to host memory."""

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
    """Keep the states (`SlotState`) of the sequence in `slot` under the key of a prefix, for later sequences."""

    slot: int
    key: bytes
    positions: tuple[int, int] | None = None  # half-open, of first tokens; None: all that the sequence has


@dataclass(frozen=True, eq=False)
class StateRestored:
    """Copy the states kept under these keys to the sequence in `slot`; they stay kept."""

    slot: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, eq=False)
class StateDiscarded:
    """States that were kept under a key are not asked for again."""

    key: bytes


@dataclass(frozen=True, eq=False)
class RowsPlaced:
    """Copies of a snapshot's KVs to the ends of rows, their keys turned by `distance` positions.

    Attributes:
        source: slots of each layer, int64 [m]; those at the first `skipped` positions are left out.
        target: as many slots of each layer as are left, int64 [n], in the same order.
    """

    source: tuple[IntArray, ...]
    target: tuple[IntArray, ...]
    skipped: int
    distance: int


Copy = (
    RowsPlaced
    | BlockCopies
    | RowsSaved
    | RowsRestored
    | CopyDiscarded
    | StateSaved
    | StateRestored
    | StateDiscarded
)


@dataclass(frozen=True, eq=False)
class CacheUpdate:
    """Changes of a ledger since its last update, applied in the order of the fields."""

    closed: tuple[int, ...] = ()
    """Slots whose sequences have ended or lost their KVs; some may be in use again."""
    copies: tuple[Copy, ...] = ()
    """Made one after the other: a block that is saved may be written by the next copy."""
    entries: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Indices of block table entries in the flattened pages, int64 [n]."""
    blocks: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Blocks that stand there now, int32 [n]."""
    pages: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Slots whose table pages changed, each with all of its pages in order."""
    lengths: tuple[RowLengths, ...] = ()
    """Set one after the other; the last one for a slot counts."""
