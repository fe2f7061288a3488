"""States that layers keep of a sequence in place of KVs: of convolutions, of recurrences. One row for each slot.

A row holds the states of all layers one behind the other, so that a fork, a swap or a snapshot copies one piece. It is
the state after a number of tokens, and the next step must continue right there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.cache.codec import round_up
from winnow.cache.formats import ITEM_BYTES
from winnow.cache.slot_states import SlotState

_ALIGNMENT = 64


@dataclass(frozen=True)
class StateShape:
    """Shape of one state that a layer keeps of each sequence."""

    layer: int
    kind: str  # "conv" or "recurrent"
    index: int  # among those of its layer and kind
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return round_up(prod(self.shape) * ITEM_BYTES[self.dtype], _ALIGNMENT)


class Computed(NamedTuple):
    """Tokens that a step computes of the sequence in a slot: start..end - 1."""

    slot: int
    start: int
    end: int
    stays: bool = True  # False: the state after them is dropped again, and that before them comes back
    drafted: bool = False  # some may be rejected: then `take_back` brings the state before them back


class RecurrentStates(SlotState):
    """The states of all sequences.

    Attributes:
        by_layer: the states of each layer that has some, by kind and index: [max_num_seqs, *shape].
    """

    name = "recurrent"
    of_prefix = True

    def __init__(
        self, shapes: Sequence[StateShape], max_num_seqs: int, device: torch.device | str = "cpu"
    ) -> None:
        self._rows = torch.zeros(
            (max_num_seqs, sum(each.nbytes for each in shapes)), dtype=torch.uint8, device=device
        )
        self._num_tokens = [0] * max_num_seqs
        self._set_aside: dict[int, Tensor] = {}  # states of sequences that compute what does not stay
        # States, and after how many tokens, of those with drafts.
        self._before: dict[int, tuple[int, Tensor]] = {}
        self.by_layer: dict[int, dict[tuple[str, int], Tensor]] = {}
        first = 0
        for each in shapes:
            end = first + prod(each.shape) * ITEM_BYTES[each.dtype]
            part = self._rows[:, first:end].view(getattr(torch, each.dtype)).unflatten(1, each.shape)
            self.by_layer.setdefault(each.layer, {})[each.kind, each.index] = part
            first += each.nbytes

    def begin(self, step: Iterable[Computed]) -> None:
        """Prepare the states for a step. The state of a sequence that begins is zero.

        A context is repeated behind its own state, each time anew.
        """
        fresh = []
        self._before.clear()
        for each in step:
            slot = each.slot
            if not each.stays:
                if slot not in self._set_aside:
                    self._set_aside[slot] = self._rows[slot].clone()
                elif each.start == self._num_tokens[slot]:
                    self._rows[slot] = self._set_aside[slot]
                continue
            if slot in self._set_aside:
                self._rows[slot] = self._set_aside.pop(slot)
            if not each.start:
                fresh.append(slot)
            else:
                assert each.start == self._num_tokens[slot], (
                    f"slot {slot} has the state after {self._num_tokens[slot]} tokens, not {each.start}"
                )
            if each.drafted:
                self._before[slot] = each.start, self._rows[slot].clone()
            self._num_tokens[slot] = each.end
        if fresh:
            self._rows[fresh] = 0

    def take_back(self, slot: int) -> None:
        self._num_tokens[slot], self._rows[slot] = self._before.pop(slot)

    def nbytes(self, slot: int) -> int:
        return self._rows[slot].nbytes

    def fork(self, slot: int, to: int) -> None:
        self._rows[to] = self._row(slot)
        self._num_tokens[to] = self._num_tokens[slot]

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> tuple[int, Tensor] | None:
        """Return tokens and state after them, uint8 [n], on the host; None: they do not end with these positions."""
        if positions is not None and positions[1] != self._num_tokens[slot]:
            return None
        return self._num_tokens[slot], self._row(slot).to("cpu", copy=True)

    def load(self, slot: int, saved: tuple[int, Tensor]) -> None:
        self._num_tokens[slot], row = saved
        self._rows[slot] = row.to(self._rows.device)

    def close(self, slot: int) -> None:
        self._num_tokens[slot] = 0
        self._set_aside.pop(slot, None)

    def to_arrays(self, saved: tuple[int, Tensor]) -> dict[str, NDArray[Any]]:
        num_tokens, row = saved
        return {"num_tokens": torch.tensor([num_tokens], device="cpu").numpy(), "row": row.numpy()}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, Tensor]:
        return int(arrays["num_tokens"][0]), torch.from_numpy(arrays["row"])

    def _row(self, slot: int) -> Tensor:
        return self._set_aside.get(slot, self._rows[slot])
