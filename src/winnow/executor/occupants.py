"""Sequences that have slots, as plans describe them to the executor."""

from dataclasses import dataclass, replace
from typing import Any

from winnow.cache.slot_states import SlotState
from winnow.engine.plan import NewSequence, StepPlan
from winnow.eviction import SequenceEviction
from winnow.sampling import Sampler, SamplingParams
from winnow.values.images import PromptImage


@dataclass
class Occupant:
    """A sequence that has a slot.

    Attributes:
        token_ids: prompt and answer as the sequence got its slot; under a policy, which may ask for their kinds, also
            those computed since.
        in_sampler: the sampler has a row for it, with its grammar.
    """

    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    index: int
    eviction: SequenceEviction | None
    in_sampler: bool = False
    images: tuple[PromptImage, ...] = ()

    @classmethod
    def of(cls, new: NewSequence) -> "Occupant":
        return cls(
            list(new.token_ids), new.prompt_len, new.params, new.index, new.eviction, images=new.images
        )

    def copy(self) -> "Occupant":
        """Return a copy that is not registered with the sampler."""
        return replace(self, token_ids=list(self.token_ids), in_sampler=False)


class Occupants(dict[int, Occupant], SlotState):
    """The occupants by slot, and their rows in the sampler, which they enter when they are first sampled."""

    name = "occupant"

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def note(self, plan: StepPlan) -> bool:
        """Add the plan's new sequences, and the tokens that it computes.

        Returns:
            Whether any of its sequences has a policy.
        """
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
        """Add a sequence, in its slot."""
        self[new.slot] = Occupant.of(new)

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> Any:
        return self[slot].copy()

    def load(self, slot: int, saved: Occupant) -> None:
        self[slot] = saved.copy()  # a round may come before a plan describes it anew

    def close(self, slot: int) -> None:
        occupant = self.pop(slot, None)
        if occupant is not None and occupant.in_sampler:
            self._sampler.remove(slot)
