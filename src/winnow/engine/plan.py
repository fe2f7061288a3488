"""What one step computes, decided before any tensor is touched."""

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from functools import cached_property

from winnow.cache import BlockCopies
from winnow.engine.request import Sequence
from winnow.eviction import ReplayPass
from winnow.outputs import LogprobDict


@dataclass(slots=True)  # not frozen: every step makes one of each sequence, which would take twice as long
class PlannedSequence:
    """`count` tokens of a sequence, from position `start`; its rows already have room for them."""

    sequence: Sequence
    slot: int
    start: int
    count: int
    samplers: tuple[Sequence, ...]
    """Sequences that sample from the last token's logits: none while a prompt is unfinished, else the sequence and
    the forks that share its prompt."""
    forks: tuple[Sequence, ...] = ()
    """Sequences that hold the same KVs from here on."""
    replay: ReplayPass | None = None
    """The tokens are not the sequence's own: they are this pass's, behind the context, and their KVs do not stay."""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def token_ids(self) -> SequenceType[int]:
        """What is computed."""
        if self.replay is None:
            return self.sequence.token_ids[self.start : self.end]
        first = self.start - self.replay.context_len
        return self.replay.token_ids[first : first + self.count]


@dataclass(frozen=True)
class StepPlan:
    """Decoding sequences first, then prefill chunks, to be computed as one packed row of tokens."""

    entries: tuple[PlannedSequence, ...]
    copies: tuple[BlockCopies, ...] = ()
    """Blocks to copy before the step writes."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(entry.count for entry in self.entries)

    @cached_property
    def samplers(self) -> list[Sequence]:
        return [sequence for entry in self.entries for sequence in entry.samplers]


@dataclass(frozen=True)
class StepResult:
    """What a step brought: one token for each of `StepPlan.samplers`, in order."""

    token_ids: list[int]
    logprobs: list[LogprobDict | None]
    prompt_logprobs: dict[int, list[LogprobDict]]
    """By index of the plan's entry: logprobs of the prompt tokens that follow those computed."""
    errors: dict[int, str] = field(default_factory=dict)
    """By index of the sampler: why it gave no token. Its request fails alone."""
