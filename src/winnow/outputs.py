"""Outputs of requests and statistics of engines. Names and shapes follow vLLM."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from winnow.errors import RequestFailedError
from winnow.values.disk_stats import DiskTierStats
from winnow.values.images import PromptImage
from winnow.values.logprob import LogprobDict
from winnow.values.tier_traffic import TierTraffic


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request so far, in seconds of the engine's clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    """Number of times that its sequences had to wait for others once they ran."""
    num_swaps: int = 0
    """Number of these that copied the KVs to host memory; after the others they are computed again."""
    swap_bytes_out: int = 0
    swap_bytes_in: int = 0
    swap_seconds: float = 0.0
    recomputed_tokens: int = 0
    """Tokens computed again, after a preemption without a copy or after a failed step."""
    recompute_seconds: float = 0.0
    """Share of the time of their steps."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival; None: there is no token yet."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end; None: unfinished."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True)
class EvictionReport:
    """Effect of eviction on the KVs of one finished answer."""

    policy: str
    kv_budget: int | None
    """Budget in KVs per row; None: it exceeded all that the answer could need, so nothing was evicted."""
    num_tokens: int
    """Tokens computed, prompt and answer."""
    kept: tuple[tuple[int, ...], ...]
    """KVs held at the end, by layer and head."""
    bytes_held: int
    bytes_freed: int
    rounds: int
    """Rounds, those of a compressed prefix that it began with included; their bytes and seconds are not."""
    seconds: float
    """Time of scoring, planning and compacting."""
    replay_tokens: int = 0
    """Tokens computed in replays of the context, if the policy's score needs one."""
    replay_seconds: float = 0.0
    """Share of the time of their steps."""
    kept_images: float | None = None
    """Part of the KVs of pictures that is held at the end, over all rows; None: the prompt has no pictures."""
    kept_text: float | None = None
    checked_answers: int = 0
    """Of all requests so far, answers that were compared with the full cache's."""
    equal_answers: int = 0

    def to_json(self, *, kept: bool = True) -> dict[str, Any]:
        """Return the fields by name, `kept` only if asked for, with `mean_kept` and `compression`."""
        values = asdict(self) | {"mean_kept": self.mean_kept, "compression": self.compression}
        del values["kept"]
        return values | ({"kept": [list(layer) for layer in self.kept]} if kept else {})

    @property
    def mean_kept(self) -> float:
        rows = [kvs for layer in self.kept for kvs in layer]
        return sum(rows) / len(rows)

    @property
    def compression(self) -> float:
        """Mean tokens per kept KV of a row; 1 if nothing was evicted."""
        return self.num_tokens / self.mean_kept


@dataclass
class CompletionOutput:
    """One answer. `finish_reason` is None while it runs, then "stop", "length", "abort" or "error"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's end-of-text token."""
    eviction: EvictionReport | None = None
    """None while the answer runs, or if no eviction was asked for."""
    error: str | None = None
    """Reason for which it failed, with `finish_reason` "error". Text and tokens are those computed before."""
    reasoning_tokens: int = 0
    """Tokens of the reasoning that it begins with, where `SamplingParams.reasoning` says how that is marked."""


@dataclass
class RequestOutput:
    """A request and its answers so far. `outputs` has one entry per sample, ordered by `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobDict | None] | None = None
    """One entry per prompt token. The first is None, as no token precedes it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KVs were in the prefix cache, and were not computed."""
    outgrown: bool = field(default=False, kw_only=True)
    """The conversation is larger than its session_memory; see `SessionStats`."""
    num_reused_tokens: int = 0
    """Prompt tokens whose KVs were computed elsewhere in another prompt (`SamplingParams.reuse`): approximate."""
    num_repaired_tokens: int = 0
    """Prompt tokens of such documents that were computed again."""
    images: tuple[PromptImage, ...] = ()
    """Pictures of the prompt: which tokens stand for them, and for what part."""

    @property
    def error(self) -> str | None:
        """Error of the first failed answer; None: none failed."""
        return next((answer.error for answer in self.outputs if answer.error is not None), None)

    def raise_for_error(self) -> None:
        """Raise RequestFailedError if an answer failed."""
        error = self.error
        if error is not None:
            raise RequestFailedError(error)


@dataclass(frozen=True)
class TenantStats:
    """Holdings of a tenant, and what it got since the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    blocks: int = 0
    """That its running requests hold; those shared among them count once."""
    guaranteed_blocks: int = 0
    limit_blocks: int = 0
    borrowed_blocks: int = 0
    """Above the guarantee: given back when the tenants that they are guaranteed to ask for them."""
    host_bytes: int = 0
    """Bytes of its swapped requests."""
    prompt_tokens: int = 0
    """Computed for it when its requests were first scheduled, without those found in the prefix cache."""
    output_tokens: int = 0
    virtual_tokens: float = 0.0
    """Its counter under scheduling_policy=fair: prices of its tokens by its weight."""


@dataclass(frozen=True)
class ValueTierStats:
    """Bytes on a value tier, and those that went to and from it since the engine's start."""

    bytes_used: int = 0
    """Bytes of the values of blocks that sequences hold."""
    bytes_budget: int = 0
    """That values may take there."""
    total: TierTraffic = field(default_factory=TierTraffic)
    last_step: TierTraffic = field(default_factory=TierTraffic)
    """Traffic in the last step, and rounds of eviction before it."""


@dataclass(frozen=True)
class CompressionOutlook:
    """Expectation of a policy where memory is short, for requests like one that waits.

    Attributes:
        num_requests: running and waiting.
        num_whole: of them, that fit into the KV memory with all their KVs at a time.
        num_compressed: that fit under the policy, as far as there are slots.
        compression: tokens of the context per KV that a row keeps after a round.
        gain: throughput under the policy in units of the full cache's, from steps as they were measured; None: none
            has been measured yet.
    """

    num_requests: int
    num_whole: int
    num_compressed: int
    compression: float
    gain: float | None

    LEAST_GAIN: ClassVar[float] = 1.02
    """A policy that promises less is not worth what it may cost in answers."""

    @property
    def pays(self) -> bool:
        """False only where measured steps say that it does not."""
        return self.gain is None or self.gain >= self.LEAST_GAIN

    def __str__(self) -> str:
        fit = f"{self.num_whole} of {self.num_requests} requests fit into the KV memory whole"
        if self.gain is None:
            return f"{fit}; compressed to {self.compression:.3g}x, {self.num_compressed} do"
        if not self.pays:
            return f"{fit}; prompts outweigh answers, so that compressing gains nothing and every KV stays"
        return (
            f"{fit}; compressed to {self.compression:.3g}x, {self.gain:.1f} times the throughput is expected"
        )


@dataclass
class AgreementRecord:
    """What came of compressed answers that were computed whole too, with the same parameters.

    Attributes:
        checked: answers that were compared; `equal` of them have the full cache's tokens.
        tokens: of these answers; `agreed` of them are what the full cache writes behind the same tokens.
        lines: ids of the others' requests, the first 100.
        waiting: answers that are compared once `check` leaves time.
    """

    checked: int = 0
    equal: int = 0
    tokens: int = 0
    agreed: int = 0
    lines: list[str] = field(default_factory=list)
    waiting: int = 0

    LEAST_CHECKED: ClassVar[int] = 8
    LEAST_SHARE: ClassVar[float] = 0.8
    """SmolLM2, 16 chats of 1,400 tokens at 8x: .83 under `winnow-seen`, whose answers are right, .76 where none is."""
    MOST_LINES: ClassVar[int] = 100

    @property
    def backs_off(self) -> bool:
        """Whether too few tokens agree for `compression=auto` to continue: one other word changes all that follows."""
        return self.checked >= self.LEAST_CHECKED and self.agreed < self.LEAST_SHARE * self.tokens


@dataclass(frozen=True)
class SessionStats:
    """A conversation that is remembered.

    Attributes:
        tier: where its KVs lie: device; partly: some gave way to others; disk, gone: all
            did, and are read or computed again.
        num_bytes: of the device, blocks that others share included.
        compressed: not all its KVs are kept.
        outgrown: it cannot be as small as its session_memory, and is kept as long as the prefix cache has room.
    """

    name: str
    tenant: str | None
    tier: str
    num_bytes: int
    num_tokens: int
    num_turns: int
    compressed: bool
    outgrown: bool
    idle_seconds: float


@dataclass(frozen=True)
class DraftRates:
    """What drafts bring where about some number of sequences decode, over the last steps.

    Attributes:
        most_running: the most sequences that are measured together.
        used: whether drafts are made.
        plain, drafted: tokens a second without and with them; None: not measured.
    """

    most_running: int
    used: bool
    plain: float | None
    drafted: float | None

    def __str__(self) -> str:
        gain = "not measured"
        if self.plain and self.drafted:
            gain = f"{self.drafted / self.plain:.2f} times"
        return f"{'on' if self.used else 'off'}, {gain}"


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine; counters run from its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    first_token_seconds: float = 0.0
    """After which the last that waits is expected to have its first token."""
    kv_bytes_used: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_budget: int = 0
    kv_bytes_held: int = 0
    """Bytes of the blocks that sequences hold."""
    prompt_tokens: int = 0
    """Prompt tokens computed; recomputed ones count again."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when their requests were first scheduled."""
    reused_tokens: int = 0
    """Prompt tokens whose KVs were computed elsewhere in other prompts, and placed."""
    repaired_tokens: int = 0
    """Prompt tokens of what was placed that were computed again."""
    cached_bytes: int = 0
    """Bytes of blocks that only the prefix cache holds: they count as free."""
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that copied KVs to host memory, in place of computing them again."""
    swap_bytes_out: int = 0
    swap_bytes_in: int = 0
    recomputed_tokens: int = 0
    """Tokens computed again, after a preemption without a copy or after a failed step."""
    recompute_seconds: float = 0.0
    """Share of `elapsed["execute"]`."""
    host_bytes_used: int = 0
    host_bytes_peak: int = 0
    host_bytes_budget: int = 0
    image_bytes: int = 0
    """Bytes of what the vision tower made of pictures (`image_memory`)."""
    value_tier: ValueTierStats | None = None
    """None: all values lie on the device."""
    disk_tier: DiskTierStats | None = None
    """None: there is no `prefix_cache_dir`."""
    sessions: dict[str, int] = field(default_factory=dict)
    """Conversations that are remembered, by where their KVs lie; see `SessionStats`."""
    session_tokens: int = 0
    """Tokens of turns that were not computed again."""
    session_seconds: float = 0.0
    """Seconds that these would have taken at the speed of prompts."""
    session_compressions: int = 0
    """Compressions of conversations for their age."""
    sessions_outgrown: int = 0
    """Conversations that could not be compressed to their session_memory, and were left to the prefix cache."""
    sessions_dropped: int = 0
    """Conversations that were forgotten to keep a budget."""
    sessions_released: int = 0
    """Conversations that ended with a turn whose request said `release`."""
    num_steps: int = 0
    num_rounds: int = 0
    """Eviction rounds, each over one or more requests."""
    replay_tokens: int = 0
    """Tokens computed in replays of contexts, if a policy's score needs them."""
    replay_seconds: float = 0.0
    """Share of `elapsed["execute"]`."""
    kv_bytes_freed: int = 0
    """Bytes freed by those rounds, those on a value tier included."""
    kv_bytes_kept: int = 0
    """Bytes of the KVs with which answers under a policy ended."""
    kv_bytes_whole: int = 0
    """Bytes that the same answers would have ended with if nothing had been evicted."""
    num_starts: int = 0
    """Requests under a policy that began to be computed."""
    num_short_starts: int = 0
    """Requests that began while not all that waited would have fitted into the KV memory whole."""
    outlook: CompressionOutlook | None = None
    """Expectation of compressing when memory was last found short; None: it never was."""
    agreement: AgreementRecord = field(default_factory=AgreementRecord)
    """Of compressed answers with the full cache's (`check`)."""
    num_draft_tokens: int = 0
    """Tokens proposed under speculative_config."""
    num_accepted_tokens: int = 0
    """Tokens of these that became part of answers."""
    draft_rates: list[DraftRates] = field(default_factory=list)
    """What drafts bring, by number of sequences; empty: nothing is measured."""
    num_replays_replaced: int = 0
    """Requests whose policy replays the context, for which a replay did not fit: a cheaper score took its place."""
    elapsed: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: schedule, evict, swap, execute (scoring included), output; padded engine: prefill, decode."""
    prefill_seconds: float = 0.0
    """Share of prompts in `elapsed["execute"]`, by tokens; paged engine only, as the next."""
    decode_seconds: float = 0.0
    """Share of decoding."""
    tenants: dict[str, TenantStats] = field(default_factory=dict)
    """Tenants by name, those configured and those that had requests, "" without one. Paged engine only."""
