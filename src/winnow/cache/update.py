"""Changes of a ledger, as values that the owner of the memory applies."""

from dataclasses import dataclass, field

import numpy as np

from winnow.cache.accounting.table_pages import TablePages
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


class PendingUpdate:
    """Builder of the next `CacheUpdate` while a ledger changes; it has the same fields.

    Attributes:
        paged: slots whose table pages changed.
    """

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.copies: list[Copy] = []
        self.entries: list[IntArray] = []
        self.paged: set[int] = set()
        self.lengths: list[RowLengths] = []
        self._last = CacheUpdate()

    def restores(self, slot: int) -> bool:
        """Return whether a copy in host memory is to be restored to a slot."""
        return any(isinstance(each, RowsRestored) and each.slot == slot for each in self.copies)

    def close(self, slot: int) -> None:
        """Record that the sequence of a slot has ended. Pending restores to the slot are dropped."""
        restored = RowsRestored, StateRestored
        self.copies = [c for c in self.copies if not (isinstance(c, restored) and c.slot == slot)]
        self.closed.append(slot)

    def take(self, pages: TablePages) -> CacheUpdate:
        """Return all that changed since the last call; `pages` are as they are now."""
        entries = np.concatenate(self.entries) if self.entries else np.empty(0, dtype=np.int64)
        update = CacheUpdate(
            closed=tuple(self.closed),
            copies=tuple(self.copies),
            # An index may stand here twice; what it names is read now, so both say the same.
            entries=entries,
            blocks=pages.entries.reshape(-1)[entries],
            pages=tuple((slot, tuple(pages.of(slot).tolist())) for slot in sorted(self.paged)),
            lengths=tuple(self.lengths),
        )
        self.closed, self.copies, self.entries, self.lengths = [], [], [], []
        self.paged = set()
        self._last = update
        return update

    def repeat(self) -> None:
        """Repeat the last update in the next one, without its copies of blocks."""
        last, self._last = self._last, CacheUpdate()
        self.closed[:0], self.lengths[:0] = last.closed, last.lengths
        self.copies[:0] = [c for c in last.copies if isinstance(c, CopyDiscarded | StateDiscarded)]
        self.entries.insert(0, last.entries)
        self.paged |= {slot for slot, _ in last.pages}
