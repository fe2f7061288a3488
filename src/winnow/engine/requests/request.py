"""Requests, their sequences, and what these have in the cache."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from winnow.cache import CacheLayout
from winnow.cache.accounting.prefix_chain import PrefixChain
from winnow.cache.accounting.token_runs import PackedRun, TokenRun
from winnow.engine.requests.new_request import NewRequest, RequestObserver
from winnow.eviction import ReplayPass, SequenceEviction
from winnow.outputs import RequestMetrics
from winnow.sampling import SamplingParams
from winnow.values.images import PromptImage, cut_run, prefix_ids
from winnow.values.logprob import LogprobDict
from winnow.values.reuse import EXACT
from winnow.values.session_request import SessionRequest


@dataclass
class KVState:
    """State of a sequence in the cache, all of it. Forking, preempting and ending a sequence act on this object.

    Attributes:
        slot: in the ledger; None: nothing is in the cache.
        host_id: of its copy in host memory, while it waits; it has no slot then, and the other fields say what the copy
            holds.
        num_computed: tokens of the sequence that are computed.
        last_round: their number at the last round of eviction; 0: there was none.
        num_rounds: how many rounds these KVs have seen.
        passes_done: passes of the replay that were computed and dropped.
        replayed: tokens of the next pass that are in the cache, behind the context.
        last_served: sequences that had been in rounds before its last one; -1: there was none since it got its slot.
    """

    slot: int | None = None
    num_computed: int = 0
    last_round: int = 0
    num_rounds: int = 0
    passes_done: int = 0
    replayed: int = 0
    host_id: int | None = None
    last_served: int = -1

    @property
    def running_slot(self) -> int:
        assert self.slot is not None, "only a running sequence has a slot"
        return self.slot

    def fork(self, slot: int) -> "KVState":
        return replace(self, slot=slot, last_served=-1)


_AS_ASKED = (
    *("observer", "priority", "tenant", "final_only", "deltas"),
    *("session", "images", "documents", "expected", "answered"),
)


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and one sequence per sample; see `NewRequest` and `Admitted` for what both bring."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    metrics: RequestMetrics
    evictions: tuple[SequenceEviction | None, ...] = (None,)
    policy_name: str | None = None
    observer: RequestObserver | None = None
    priority: int = 0
    tenant: str | None = None
    arrival: int = 0
    """Number of requests that came before it; set by the queue."""
    final_only: bool = False
    deltas: bool = False
    num_cached_tokens: int = 0
    """Tokens of the prompt whose KVs were there when its first sample got a slot."""
    prompt_logprobs: list[LogprobDict | None] = field(default_factory=list)
    forked: bool = False
    """True if sequences with other tokens may hold blocks of its own: forks of it, or what it was forked from."""
    error: str | None = None
    """Fault of the prompt's logits or their texts; ends each answer with its first token."""
    reserved_tokens: int | None = None
    outgrown: bool = False
    """Whether its conversation is larger than its session_memory."""
    session: SessionRequest | None = None
    images: tuple[PromptImage, ...] = ()
    documents: tuple[tuple[int, int], ...] = ()
    reuse: str = EXACT
    """How KVs of others are found; see `winnow.values.reuse`."""
    num_reused_tokens: int = 0
    """Tokens of the prompt whose KVs were placed, and are approximate."""
    num_repaired_tokens: int = 0
    """Tokens of placed spans that were computed again."""
    expected: tuple[int, ...] = ()
    answered: int = 0
    sequences: list["Sequence"] = field(init=False)

    @classmethod
    def of(
        cls, new: NewRequest, params: SamplingParams, max_tokens: int, arrival_time: float, **granted: Any
    ) -> Self:
        """Make the engine's record of an admitted request; `params` leave nothing open, `granted` are other fields."""
        asked = {name: getattr(new, name) for name in _AS_ASKED}
        metrics = RequestMetrics(arrival_time)
        return cls(new.request_id, new.prompt, new.token_ids, params, max_tokens, metrics, **asked, **granted)

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]
        # The first sample computes the prompt; the others share its blocks as soon as it is through.
        self.sequences[0].forks = self.sequences[1:]

    @property
    def fork_at(self) -> int:
        """Tokens that samples compute together: the prompt, or what a round sees if they keep different amounts."""
        eviction = self.evictions[0]
        if len(self.evictions) == 1 or eviction is None:
            return len(self.prompt_token_ids)
        return eviction.context_len

    @cached_property
    def two_way(self) -> tuple[tuple[int, int], ...]:
        """Runs of tokens that no step may cut; see `PromptImage`."""
        return tuple(run for image in self.images for run in image.two_way)

    def uncut(self, start: int, end: int) -> int:
        """Return `end` of a step, before the run of tokens that it would cut; behind one that the step begins with,
        at `start`, though that may be more tokens than a step has."""
        run = cut_run(self.two_way, end) if start < end else None
        return end if run is None else run[0] if run[0] > start else run[1]

    def update_metrics(self, **changes: Any) -> None:
        self.metrics = replace(self.metrics, **changes)  # outputs hold the former ones

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether prompt logprobs are asked for and not yet complete."""
        missing = len(self.prompt_logprobs) < len(self.prompt_token_ids)
        return missing and self.params.prompt_logprobs is not None


@dataclass
class RoundTally:
    rounds: int = 0
    sequences: int = 0
    """That took part, over all rounds."""
    freed_blocks: int = 0
    seconds: float = 0.0

    def add(self, freed_blocks: int, seconds: float, sequences: int = 1) -> None:
        self.rounds += 1
        self.sequences += sequences
        self.freed_blocks += freed_blocks
        self.seconds += seconds


@dataclass
class ReplayTally:
    """Tally of replays."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its tokens, and how many of them are in the cache.

    Waiting: it has no slot. Running: it has one, and `kv.num_computed` of its tokens are computed. A token is sampled
    when all are computed, which makes a preempted sequence just one with much to compute.
    """

    request: Request
    index: int
    token_ids: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    eviction: SequenceEviction | None = field(init=False)
    """Eviction that holds since it started last; None: nothing will be evicted."""
    kv: KVState = field(default_factory=KVState)
    prefix: PrefixChain | None = None
    """The keys under which its blocks are shared; None: they are not."""
    runs: list[TokenRun] = field(default_factory=list)
    """Tokens that are to be placed, from where they are known."""
    packed: list[PackedRun] = field(default_factory=list)
    """Compressed documents that are to be placed whole."""
    reused: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that were placed since it got its slot, half-open."""
    fetch: Any = None
    """Parts of files that are read for it while it waits (`memory.file_lookup`); None: not looked up yet."""
    awaits_tower: bool = False
    """The vision tower computes pictures of its next tokens."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    preempted_alone_at: int | None = None
    """Tokens that it had when it was last preempted while it had the cache for itself."""
    num_tokens_preempted: int | None = None
    """Tokens that it had when it was last preempted."""
    num_tokens_computed: int = 0
    """Most that were ever in the cache and then dropped: computing them is computing them again."""
    forks: list["Sequence"] = field(default_factory=list)
    logprobs: list[LogprobDict | None] = field(default_factory=list)
    replay: ReplayTally = field(default_factory=ReplayTally)
    rounds: RoundTally = field(default_factory=RoundTally)
    """Both of all the sequence's, those before a preemption too."""
    kept: NDArray[np.int32] | None = None
    """KVs per layer and head when the sequence ended."""
    kept_parts: tuple[float, float] | None = None
    """Parts of the KVs of pictures, and of text, that were held then."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self._prompt_prefix_ids = prefix_ids(self.request.prompt_token_ids, self.request.images)
        self.prompt_len = len(self.token_ids)
        self.eviction = self.asked_eviction

    @property
    def is_reading(self) -> bool:
        return self.fetch is not None and bool(self.fetch.is_reading)

    @property
    def is_held_up(self) -> bool:
        """Return whether it waits for other than room: what is read from disk, or its pictures."""
        return self.is_reading or self.awaits_tower

    @property
    def asked_eviction(self) -> SequenceEviction | None:
        """Policy that was asked for; None: nothing will ever be evicted."""
        evictions = self.request.evictions
        return evictions[self.index if len(evictions) > 1 else 0]

    def decide(self, compression: float | None) -> None:
        """Decide, before it starts, whether a late policy holds, and to what it compresses the prompt; None: it does
        not."""
        asked = self.asked_eviction
        if asked is not None and asked.policy.when.late:
            eviction = None
            if compression is not None:
                eviction = replace(asked, first_budget=asked.at(compression).budget)
            if eviction != self.eviction:
                self.eviction, self.prefix = eviction, None

    @property
    def prefix_ids(self) -> list[int]:
        """Its token ids as the keys of prefixes have them; see `winnow.values.images.prefix_ids`."""
        if not self.request.images:
            return self.token_ids
        return self._prompt_prefix_ids + self.token_ids[self.prompt_len :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def expected_tokens(self) -> int:
        """Tokens that it comes to if its answer takes the `max_tokens` that were asked for; without, those so far."""
        asked = 0 if self.request.params.max_tokens is None else self.request.max_tokens
        return max(self.num_tokens, self.prompt_len + asked)

    @property
    def owns_blocks(self) -> bool:
        """Return whether it shares no KVs with siblings: rounds after the prompt, its own budget, or reserved
        blocks."""
        if len(self.request.evictions) > 1 or self.request.reserved_tokens is not None:
            return True
        return self.eviction is not None and self.eviction.policy.owns_blocks

    @property
    def may_share_outside(self) -> bool:
        """Return whether its blocks may be held by sequences other than samples that are as far as it is."""
        return self.prefix is not None or self.request.forked

    @property
    def num_to_compute(self) -> int:
        return len(self.token_ids) - self.kv.num_computed

    @property
    def is_decoding(self) -> bool:
        """Return whether all that is left to compute is the token sampled last."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.kv.num_computed == 1 and num_tokens > self.prompt_len

    @property
    def before_replay_round(self) -> bool:
        """Return whether the context is computed, and a round with a replay before it is still to come."""
        eviction = self.eviction
        if eviction is None or not eviction.passes:
            return False
        return self.kv.num_computed == eviction.context_len != self.kv.last_round

    @property
    def next_pass(self) -> ReplayPass | None:
        """The pass of its replay that is due before anything else, from token `replayed` on."""
        if not self.before_replay_round:
            return None
        assert self.eviction is not None, "only policies replay"
        passes = self.eviction.passes
        return passes[self.kv.passes_done] if self.kv.passes_done < len(passes) else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def slides(self, layout: CacheLayout) -> bool:
        """Return whether its rows may give back what sliding windows have passed. A replay goes, and what comes after
        it sees what the replay's own tokens no longer do."""
        if self.eviction is None:
            return True
        return not self.kv.replayed and len(layout.evictable) < layout.num_layers

    @property
    def sure_eviction(self) -> SequenceEviction | None:
        """Its eviction as far as its rounds come for certain; None: none does."""
        eviction = self.eviction
        if eviction is None or not eviction.policy.when.late:
            return eviction
        return None if eviction.first_budget is None else eviction.first

    def longest_row(self, layout: CacheLayout) -> int:
        if self.request.reserved_tokens is not None:
            return max(self.request.reserved_tokens, self.num_tokens)
        if self.eviction is None:
            return max(layout.seen(self.num_tokens))
        return self.eviction.longest_row(layout, self.num_tokens)

    def peak_blocks(self, layout: CacheLayout, ahead: int = 0, state: KVState | None = None) -> int:
        """Return the most blocks that it holds until all its tokens and `ahead` further ones are computed. It continues
        from `state`; None: its own."""
        num_tokens, state = self.num_tokens + ahead, state or self.kv
        reserved, eviction = self.request.reserved_tokens, self.sure_eviction
        if eviction is None:
            most = layout.blocks_seen(num_tokens) if reserved is None else 0
        elif state.last_round >= eviction.context_len:  # the whole context, and a replay behind it, is over
            most = eviction.decode_blocks(layout, num_tokens)
        else:
            most = eviction.peak_blocks(layout, num_tokens)
        return most if reserved is None else max(most, layout.blocks_for(reserved))
