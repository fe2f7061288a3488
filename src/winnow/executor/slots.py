"""What the executor keeps of the sequences that have slots."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from winnow.engine.plan import NewSequence, StepPlan
from winnow.eviction import SequenceEviction
from winnow.sampling import SamplingParams


@dataclass
class SlotState:
    """A sequence as its plans describe it.

    Attributes:
        token_ids: prompt and answer as the sequence got its slot; under a policy, which may ask for their kinds, also
            those computed since.
        in_sampler: the sampler has a slot for it.
    """

    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    index: int
    eviction: SequenceEviction | None
    in_sampler: bool = False

    @classmethod
    def of(cls, new: NewSequence) -> "SlotState":
        return cls(list(new.token_ids), new.prompt_len, new.params, new.index, new.eviction)

    def copy(self) -> "SlotState":
        """The same sequence, which the sampler does not know."""
        return replace(self, token_ids=list(self.token_ids), in_sampler=False)


class SlotStates(dict[int, SlotState]):
    """By slot."""

    def follow(self, plan: StepPlan) -> None:
        """Learn of the plan's new sequences, and of tokens that are computed for the first time."""
        for new in plan.new_sequences:
            self.add(new)
        for entry in plan.entries:
            state = self[entry.slot]
            if state.eviction is not None and entry.replay is None and entry.end > len(state.token_ids):
                state.token_ids += entry.token_ids[len(state.token_ids) - entry.end :]

    def add(self, new: NewSequence) -> None:
        """Learn of a sequence that has got a slot."""
        self[new.slot] = SlotState.of(new)

    def drop(self, slots: Iterable[int]) -> list[int]:
        """Forget sequences that have ended. Returns the slots that the sampler knew."""
        states = [(slot, self.pop(slot, None)) for slot in slots]
        return [slot for slot, state in states if state is not None and state.in_sampler]
