"""Plan of one step: host values, which can be sent to another process."""

from dataclasses import dataclass, field
from functools import cached_property

from winnow.cache import CacheUpdate
from winnow.cache.layout import IntArray
from winnow.eviction import SequenceEviction
from winnow.sampling import SamplingParams
from winnow.values.images import PromptImage
from winnow.values.logprob import LogprobDict
from winnow.values.tier_traffic import TierTraffic

LAST_SAMPLED = -1
"""Planned in place of a token id: what the slot sampled last, which the executor may know before the scheduler."""


@dataclass(frozen=True)
class NewSequence:
    """Description of a sequence that gets a slot, sent to the executor once and kept until the slot closes.

    Its `token_ids` are prompt and answer so far, also where it computes them again; `index` is among samples.
    """

    slot: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    index: int = 0
    eviction: SequenceEviction | None = None
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True, eq=False)
class PlacedSpan:
    """Tokens of a sequence, from index `start` on, whose KVs were computed at other positions or behind other tokens.

    They are copied from `blocks`, int32 [n, rows], the first one from slot `offset` of the first block; keys are turned
    to their new positions.
    """

    start: int
    count: int
    offset: int
    blocks: IntArray


@dataclass(slots=True)  # not frozen: every step makes one of each sequence, which would take twice as long
class PlannedSequence:
    """Tokens of the sequence in a slot, from token index `start` on; its rows already have room for them.

    Attributes:
        samplers: slots that sample from the last token's logits: none while a prompt is unfinished, else this one
            and those of the forks that share its prompt.
        forks: slots that hold the same KVs from here on.
        replay: pass of a replay that the tokens belong to, which repeats the context and whose KVs are dropped;
            None: they are tokens of the sequence itself.
        logprobs: indices of tokens, half-open, whose logits are asked for since they predict the prompt's next ones.
        num_drafts: its last tokens of this number are proposals: the slot, which alone samples, samples from the logits
            of the token before them and of each, as far as it samples what is proposed.
        placed: spans among its tokens whose KVs are placed; all are computed in the first layers, and only some, the
            `repaired` ones, in the others.
    """

    slot: int
    start: int
    token_ids: list[int]
    samplers: tuple[int, ...] = ()
    forks: tuple[int, ...] = ()
    replay: int | None = None
    logprobs: tuple[int, int] | None = None
    num_drafts: int = 0
    placed: tuple[PlacedSpan, ...] = ()
    repaired: int = 0

    @property
    def reused(self) -> int:
        """Tokens that are not computed in all layers."""
        return sum(span.count for span in self.placed) - self.repaired

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """Tokens computed as one packed batch: decoding sequences first, then prefill chunks."""

    entries: tuple[PlannedSequence, ...]
    update: CacheUpdate = field(default_factory=CacheUpdate)
    """Changes of the cache since the executor last heard of it, the room for this step's tokens included."""
    new_sequences: tuple[NewSequence, ...] = ()
    """Sequences that got a slot since, forks included."""
    evictions: tuple["PlannedEviction", ...] = ()
    """Rounds that come before the next step, if nothing else changes: sizes of what they leave come back with it."""

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.entries)

    @cached_property
    def drafts(self) -> list[list[int]]:
        """Draft tokens of each sampler; empty if there are none."""
        if not any(entry.num_drafts for entry in self.entries):
            return []
        return [
            entry.token_ids[entry.count - entry.num_drafts :]
            for entry in self.entries
            for _ in entry.samplers
        ]

    @cached_property
    def samplers(self) -> list[int]:
        """The slots that sample, in order."""
        return [slot for entry in self.entries for slot in entry.samplers]


@dataclass(frozen=True)
class PlannedEviction:
    """Eviction round of a sequence, which cuts its rows to its budget.

    Attributes:
        computed: tokens in the cache, less what rounds took.
        budget: KVs per row in place of the policy's; None: as that says.
        siblings: slots of samples that share what the round leaves.
    """

    slot: int
    computed: int
    budget: int | None = None
    siblings: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """Result of a step: the tokens of each of `StepPlan.samplers`, in order."""

    token_ids: list[int]
    logprobs: list[LogprobDict | None]
    prompt_logprobs: dict[int, list[LogprobDict]]
    """Logprobs, by index of the plan's entry, of the prompt tokens that follow those computed."""
    errors: dict[int, str] = field(default_factory=dict)
    """Reasons, by index of the sampler, for which it gave no token. Its request fails alone."""
    offsets: list[int] | None = None
    """Offsets in `token_ids` at which the tokens of each sampler begin, and after the last the end; None: one each."""
    traffic: TierTraffic | None = None
    """Traffic to and from tiers since the last step; None: none do."""
    kept: IntArray | None = None
    """Sizes of what `StepPlan.evictions` leave, as of `Executor.plan_evictions`; None: there are none."""


ONE_EACH = StepResult([], [], {})
"""Of a step whose samplers have a token each, whichever it is."""
