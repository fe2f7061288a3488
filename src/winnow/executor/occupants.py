"""Sequences that have slots, as plans describe them to the executor."""

from collections.abc import Iterable
from dataclasses import replace

from winnow.cache.slot_states import SlotState
from winnow.engine.plan import NewSequence, StepPlan
from winnow.sampling import Sampler


class Occupants(dict[int, NewSequence], SlotState):
    """The sequences by slot, and their rows in the sampler, which they enter when they are first sampled.

    Their `token_ids` are prompt and answer as they got their slots; under a policy, which may ask for their kinds, also
    those computed since.
    """

    name = "occupant"

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler
        self._sampled: set[int] = set()

    def note(self, plan: StepPlan) -> bool:
        """Add the plan's new sequences, and the tokens that it computes. Returns whether any sequence has a policy."""
        evicts = False
        for new in plan.new_sequences:
            self.add(new)
        for entry in plan.entries:
            occupant = self[entry.slot]
            if occupant.eviction is None:
                continue
            evicts = True
            if entry.replay is None:
                # In place of drafts too, which may have been rejected.
                occupant.token_ids[entry.start : entry.end] = entry.token_ids
        return evicts

    def add(self, new: NewSequence) -> None:
        self.load(new.slot, new)

    def enter(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot not in self._sampled:
                each = self[slot]
                prompt, answer = each.token_ids[: each.prompt_len], each.token_ids[each.prompt_len :]
                self._sampler.add(slot, each.params, prompt, answer, each.index)
                self._sampled.add(slot)  # after it: the sampler may have refused

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> NewSequence:
        return replace(self[slot], token_ids=list(self[slot].token_ids))

    def load(self, slot: int, saved: NewSequence) -> None:
        # A round may come before a plan describes it anew.
        self[slot] = replace(saved, slot=slot, token_ids=list(saved.token_ids))
        self._sampled.discard(slot)

    def close(self, slot: int) -> None:
        self.pop(slot, None)
        if slot in self._sampled:
            self._sampled.remove(slot)
            self._sampler.remove(slot)
