"""Tokens proposed to follow those of decoding sequences: a step computes them too, and keeps those that are right."""

from collections.abc import Mapping, Sequence as SequenceType
from typing import Protocol

import numpy as np

from winnow.cache import CacheLayout
from winnow.cache.layout import IntArray
from winnow.config.scheduler import SpeculativeConfig
from winnow.engine.plan import StepPlan
from winnow.engine.requests.request import Sequence
from winnow.engine.scheduling.draft_gate import Chance, DraftGate
from winnow.errors import ConfigError
from winnow.outputs import DraftRates

# Tokens before its first drafts that a source computes of a sequence: in a look, where drafts pay, and without a gate.
_LOOKED_AT, _CONTEXT, _WHOLE = 64, 1024, 2**62
# Tokens of an expected answer in a step: each has a row of logits.
_COMPARED = 64


class DraftSource(Protocol):
    """Where drafts come from. What it proposes is of no matter to answers, only to their speed.

    Attributes:
        reads_cache: it attends over the sequences' own KVs, so that the executor must know all of the ledger before.
        price: seconds of a draft, about, as a part of a step of the model that answers.
    """

    reads_cache: bool
    price: float

    @property
    def used_bytes(self) -> int:
        """KV memory that it holds."""

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        """Return how many drafts, at most `most`, there may be of each sequence; those of none are left out. At most
        `context` tokens before the drafts of a sequence may be computed for them."""

    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Return drafts of sequences, after `rooms` for the same tokens; fewer or none where it has no more."""


class Drafts:
    """Proposer of tokens; answers are those without it, for only tokens sampled alike are kept.

    It proposes nothing where a rejected token would leave traces: in what policies learn of decoded tokens, and for
    observers. Raises ConfigError where the cache cannot take KVs back. The next step computes `again` as many tokens,
    where a rejected one led a state back.
    """

    def __init__(
        self, config: SpeculativeConfig | None, layout: CacheLayout, source: DraftSource | None = None
    ) -> None:
        self.num_proposed = self.num_accepted = self.again = self._again = 0
        self._config = config
        self._is_drafting = False
        self._chance, self._chances = Chance(0.98, 0.6, 1.0), dict[Sequence, Chance]()
        if config is None:
            return
        self._source = source or PromptLookup(config)
        self.gate = DraftGate(adaptive=config.adaptive, price=self._source.price)
        for found, what in (
            (
                layout.state_bytes > 0 and layout.ranks > 1,
                "with tensor_parallel_size layers that keep recurrent states cannot take tokens back",
            ),
            (layout.wide.any, "kv_wide keeps the last KVs, rejected ones among them"),
            (layout.value_tier is not None, "value_tier moves values as they come"),
        ):
            if found:
                raise ConfigError(f"speculative_config is not served with this cache: {what}")

    def wanted(self, num_sequences: int) -> bool:
        """Return whether the next step may have drafts if this number of sequences decodes."""
        return self._config is not None and self.gate.drafts(num_sequences)

    def read_cache(self, num_sequences: int) -> bool:
        return self.wanted(num_sequences) and self._source.reads_cache

    def propose(self, decoding: SequenceType[Sequence], most: int) -> dict[Sequence, list[int]]:
        """Return draft tokens of the sequences that have any, at most `most` in all."""
        if len(decoding) == 1 and (expected := decoding[0].request.expected):
            first = decoding[0].num_output_tokens  # the step samples one token more than it is proposed
            draft = list(expected[first : min(first + min(most, _COMPARED), len(expected) - 1)])
            self._is_drafting = False
            return {decoding[0]: draft} if draft else {}
        self._is_drafting = bool(decoding) and self.wanted(len(decoding))
        if self._config is None or not self._is_drafting:
            return {}
        if len(self._chances) > 2 * len(decoding) + 64:
            self._chances = {each: self._chances[each] for each in decoding if each in self._chances}
        limits = {}
        for sequence in decoding:
            # The step samples one token more, and the answer's last one is never computed.
            left = sequence.request.max_tokens - sequence.num_output_tokens - 1
            left = min(left, self._config.num_speculative_tokens)
            if left > 0 and may_draft(sequence):
                limits[sequence] = left
        context = _LOOKED_AT if self.gate.looks else _CONTEXT
        rooms = self._source.rooms(limits, context if self._config.adaptive else _WHOLE)
        prior = self._chance.expect(0.6)
        chances = [self._chances[each].expect(prior) if each in self._chances else prior for each in rooms]
        counts = self.gate.allot(len(decoding), list(rooms.values()), chances)
        allotted = dict[Sequence, int]()
        for sequence, count in zip(rooms, counts, strict=True):
            if count := min(count, most):
                allotted[sequence] = count
                most -= count
        return {each: draft for each, draft in self._source.propose(allotted).items() if draft}

    @property
    def used_bytes(self) -> int:
        return 0 if self._config is None else self._source.used_bytes

    def rates(self) -> list[DraftRates]:
        return [] if self._config is None else self.gate.rates()

    def count(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        if sequence.request.expected:
            return
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        self._chance.record(num_proposed, num_accepted)
        self._chances.setdefault(sequence, Chance(0.9)).record(num_proposed, num_accepted)

    def record(self, plan: StepPlan, num_tokens: int, seconds: float) -> None:
        """Record what a step added to answers, and the time since the one before; steps of prompts tell nothing."""
        if self._config is None:
            return
        num_drafts = sum(entry.num_drafts for entry in plan.entries) + self._again
        if plan.num_tokens == len(plan.entries) + num_drafts:
            drafted = self._is_drafting or self._again > 0
            self.gate.record(len(plan.entries), drafted, num_drafts, num_tokens, seconds)
        self._again, self.again = self.again, 0


def may_draft(sequence: Sequence) -> bool:
    request, eviction = sequence.request, sequence.eviction
    if request.observer is not None:
        return False
    return eviction is None or not (  # else a rejected token leaves a trace
        eviction.policy.when.in_decode or eviction.policy.observes[True] or sequence.before_replay_round
    )


class PromptLookup:
    """Source of what followed the last tokens where they stood before."""

    used_bytes, reads_cache, price = 0, False, 0.0

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._found = dict[Sequence, list[int]]()
        self._known = dict[Sequence, tuple[IntArray, int]]()

    def rooms(self, most: Mapping[Sequence, int], context: int) -> Mapping[Sequence, int]:
        if len(self._known) > 2 * len(most) + 64:
            self._known = {each: self._known[each] for each in most if each in self._known}
        self._found = {
            each: found
            for each, limit in most.items()
            if (found := look_up(self._tokens(each), self._config, limit))
        }
        return {each: len(found) for each, found in self._found.items()}

    def propose(self, counts: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        return {each: self._found[each][:count] for each, count in counts.items()}

    def _tokens(self, sequence: Sequence) -> IntArray:
        tokens = sequence.token_ids
        array, known = self._known.get(sequence, (np.empty(0, dtype=np.int32), 0))
        if len(tokens) > len(array):
            array = np.concatenate([array[:known], np.empty(2 * len(tokens) - known, dtype=np.int32)])
        array[known : len(tokens)] = tokens[known:]
        self._known[sequence] = array, len(tokens)
        return array[: len(tokens)]


def look_up(tokens: IntArray, config: SpeculativeConfig, most: int) -> list[int]:
    """Return what followed the last tokens where most of them stood before: first, at most `most` tokens."""
    ends, length = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
    while len(ends) and length < config.prompt_lookup_max:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < config.prompt_lookup_min:
        return []
    first = int(ends[0]) + 1
    found: list[int] = tokens[first : first + most].tolist()
    return found
