"""What some budgets must know of tokens and layers: kept here only for sequences whose policy asks."""

from collections.abc import Sequence as SequenceType

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow.attention import Spans
from winnow.engine.plan import StepPlan
from winnow.engine.request import Sequence


class EngineSignals:
    """See `winnow.eviction.Signals`.

    Args:
        kinds: uint8 [vocab], the kind of every token id.
    """

    def __init__(self, max_num_seqs: int, num_layers: int, kinds: Tensor, device: torch.device) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._sums = torch.zeros((max_num_seqs, num_layers), dtype=torch.float32, device=device)
        self._counts = torch.zeros(max_num_seqs, dtype=torch.float32, device=device)
        self._kinds = kinds
        self._device = device

    def note(self, plan: StepPlan) -> Tensor | None:
        """Learn who computes what. Returns which tokens of the batch count for similarity, [T], or None if none do."""
        watched: set[int] = set()
        for entry in plan.entries:
            eviction = entry.sequence.eviction
            if eviction is None or entry.replay is not None:
                continue
            budget = eviction.policy.budget
            if budget.needs_kinds or budget.needs_similarity:
                self._sequences[entry.slot] = entry.sequence
            if budget.needs_similarity and entry.start < entry.sequence.prompt_len:
                watched.add(entry.slot)
                if entry.start == 0:
                    self._sums[entry.slot] = self._counts[entry.slot] = 0.0
        if not watched:
            return None
        counts = [entry.slot in watched for entry in plan.entries for _ in range(entry.count)]
        return torch.tensor(counts, device=self._device)

    def add_similarity(self, layer: int, spans: Spans, counts: Tensor, before: Tensor, after: Tensor) -> None:
        """Add a batch's cosines. counts [T]; before and after attention [T, hidden_size]."""
        cosine = F.cosine_similarity(before.float(), after.float(), dim=-1).masked_fill(~counts, 0.0)
        self._sums[:, layer].index_add_(0, spans.token_slots, cosine)
        if layer == 0:
            self._counts.index_add_(0, spans.token_slots, counts.float())

    def fork(self, plan: StepPlan) -> None:
        """Sequences that a computed step has forked inherit what is known of their prompt."""
        for entry in plan.entries:
            for fork in entry.forks:
                if entry.slot in self._sequences:
                    slot = fork.running_slot
                    self._sequences[slot] = fork
                    self._sums[slot], self._counts[slot] = self._sums[entry.slot], self._counts[entry.slot]

    def forget(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def similarity(self, slots: SequenceType[int]) -> Tensor:
        index = list(slots)
        return self._sums[index] / self._counts[index, None].clamp_min(1)

    def kinds(self, slots: SequenceType[int]) -> Tensor:
        rows = [self._kinds[torch.tensor(self._sequences[slot].token_ids)] for slot in slots]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self._device)
