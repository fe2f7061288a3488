"""Last hidden states of sequences, which the heads of a model draft from: those of the last tokens of each."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from winnow.cache.slot_states import SlotState
from winnow.engine.plan import StepPlan
from winnow.engine.requests.request import Sequence
from winnow.models import LoadedModel


class HiddenStates(SlotState):
    """A ring of `window` tokens for each slot, of a model loaded with `hidden`. What is swapped out is not kept."""

    name = "hidden"

    def __init__(self, model: LoadedModel, max_num_seqs: int, window: int) -> None:
        from winnow.models.model.kinds import text_part  # transformers

        self.window = window
        size = hidden_size(model)
        self._rows = torch.zeros(max_num_seqs * window, size, dtype=model.dtype, device=model.device)
        self.total_bytes = self._rows.nbytes
        self._held = [(0, 0)] * max_num_seqs
        self._last: Tensor | None = None
        text_part(model.model).register_forward_hook(self._see)

    def _see(self, _: Any, __: Any, output: Any) -> None:
        self._last = output[0][0]

    def record(self, plan: StepPlan) -> None:
        """Keep those of the step that the model has just computed."""
        assert self._last is not None, "the model was run"
        places, tokens, first = [], [], 0
        for entry in plan.entries:
            if entry.replay is None:
                begin, end = self._held[entry.slot]
                begin = begin if begin <= entry.start <= end else entry.start
                kept = min(entry.count, self.window)
                self._held[entry.slot] = max(begin, entry.end - self.window), entry.end
                places.append(self._places(entry.slot, entry.end - kept, entry.end))
                tokens.append(np.arange(first + entry.count - kept, first + entry.count))
            first += entry.count
        if places:
            device = self._rows.device
            at, of = (torch.from_numpy(np.concatenate(each)).to(device) for each in (places, tokens))
            self._rows[at] = self._last[of].to(self._rows.dtype)
        self._last = None

    def held(self, slot: int) -> tuple[int, int]:
        """Return which tokens of a slot's sequence are held, half-open; the last may have been rejected."""
        return self._held[slot]

    def holds(self, sequence: Sequence) -> bool:
        """Return whether that of the token before a sequence's last one, which is still to be computed, is held."""
        first, end = self._held[sequence.kv.running_slot]
        return first < sequence.num_tokens - 1 <= end

    def read(self, slot: int, first: int, end: int) -> Tensor:
        """Return those of tokens first..end - 1, [n, D]."""
        return self._rows[torch.from_numpy(self._places(slot, first, end)).to(self._rows.device)]

    def _places(self, slot: int, first: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(first, end) % self.window + slot * self.window

    def fork(self, slot: int, to: int) -> None:
        size = self.window
        self._rows[to * size : (to + 1) * size] = self._rows[slot * size : (slot + 1) * size]
        self._held[to] = self._held[slot]

    def close(self, slot: int) -> None:
        self._held[slot] = 0, 0


def hidden_size(model: LoadedModel) -> int:
    return int(cast(Any, model.model).config.get_text_config().hidden_size)
