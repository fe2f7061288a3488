"""Everything of a sequence that is no block: one list, which forks, swap, prefixes and disk walk."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from winnow.cache.update import (
    CacheUpdate,
    CopyDiscarded,
    RowsRestored,
    RowsSaved,
    StateDiscarded,
    StateRestored,
    StateSaved,
)
from winnow.errors import describe_error


class SlotState:
    """One thing that is kept of every sequence, by its slot; the methods here keep nothing.

    Attributes:
        name: of its arrays on disk; none other has it.
        of_prefix: whether it follows from a prefix's tokens and its rounds alone, so that who begins with the prefix
            begins with it too.
    """

    name: str
    of_prefix: ClassVar[bool] = False

    def nbytes(self, slot: int) -> int:
        """Return bytes of what `save` returns."""
        return 0

    def fork(self, slot: int, to: int) -> None:
        """Copy the state of the sequence in `slot` to slot `to`."""

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> Any:
        """Copy a sequence's state to the host; with `positions`, half-open, that of these first positions only."""

    def load(self, slot: int, saved: Any) -> None:
        """Add a saved state to that of a sequence. `saved` stays usable."""

    def close(self, slot: int) -> None:
        """Forget a sequence."""

    def to_arrays(self, saved: Any) -> dict[str, NDArray[Any]]:
        """Return the saved state of a prefix as arrays for a file."""
        return {}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """Return what `to_arrays` returned, as it was saved."""


class SlotStates:
    """The list, and what of it is kept of sequences in host memory, by the ids of their copies, and of prefixes."""

    def __init__(self, states: Iterable[SlotState] = ()) -> None:
        self._states = list(states)
        self._saved: dict[int | bytes, list[Any]] = {}

    def add(self, *states: SlotState) -> None:
        self._states += states

    @property
    def host_ids(self) -> set[int]:
        return {name for name in self._saved if isinstance(name, int)}

    @property
    def prefixes(self) -> set[bytes]:
        return {name for name in self._saved if isinstance(name, bytes)}

    def nbytes(self, slot: int) -> int:
        return sum(state.nbytes(slot) for state in self._states)

    def fork(self, slot: int, to: int) -> None:
        for state in self._states:
            state.fork(slot, to)

    def follow(self, update: CacheUpdate) -> dict[int, str]:
        """Follow a ledger: save sequences before their slots are cleared, and load others afterwards. Returns ids of
        the copies to host memory that failed, and why."""
        failed: dict[int, str] = {}
        loads: list[tuple[int, list[Any]]] = []
        for each in update.copies:
            match each:
                case RowsSaved():
                    try:
                        self._saved[each.host_id] = [state.save(each.slot) for state in self._states]
                    except (MemoryError, RuntimeError) as error:
                        failed[each.host_id] = describe_error(error)
                case RowsRestored() if each.host_id in self._saved:
                    loads.append((each.slot, self._saved[each.host_id]))
                case CopyDiscarded():
                    self._saved.pop(each.host_id, None)
                case StateSaved():
                    self._saved[each.key] = [
                        state.save(each.slot, each.positions) if state.of_prefix else None
                        for state in self._states
                    ]
                case StateRestored():
                    loads += [(each.slot, self._saved[key]) for key in each.keys if key in self._saved]
                case StateDiscarded():
                    self._saved.pop(each.key, None)
        for slot in update.closed:
            for state in self._states:
                state.close(slot)
        for slot, everything in loads:
            for state, saved in zip(self._states, everything, strict=False):  # some were added since
                if saved is not None:
                    state.load(slot, saved)
        return failed

    def read(self, key: bytes) -> dict[str, NDArray[Any]]:
        """Return the states kept under the key of a prefix as arrays for a file."""
        return {
            f"{state.name}.{name}": array
            for state, saved in zip(self._states, self._saved.get(key, ()), strict=False)
            if saved is not None
            for name, array in state.to_arrays(saved).items()
        }

    def write(self, key: bytes, arrays: Mapping[str, NDArray[Any]]) -> None:
        by_state: defaultdict[str, dict[str, NDArray[Any]]] = defaultdict(dict)
        for name, array in arrays.items():
            of, _, own = name.partition(".")
            by_state[of][own] = array
        self._saved[key] = [
            state.from_arrays(by_state[state.name]) if state.of_prefix else None for state in self._states
        ]
