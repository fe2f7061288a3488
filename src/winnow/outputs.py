"""What a request gives back. Names and shapes as vLLM users know them."""

from dataclasses import asdict, dataclass, field
from typing import Any

from winnow.errors import RequestFailedError
from winnow.sampling import Logprob

LogprobDict = dict[int, Logprob]


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request up to now, in seconds of the engine's clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass(frozen=True)
class EvictionReport:
    """What eviction did to the KVs of one answer, told when it ends."""

    policy: str
    kv_budget: int | None
    """KVs per row that it was held to; None: the budget was above all it could need, so nothing was ever taken."""
    num_tokens: int
    """Tokens computed, prompt and answer."""
    kept: tuple[tuple[int, ...], ...]
    """KVs held at the end, by layer and head."""
    bytes_held: int
    """Of the blocks that these KVs lie in."""
    bytes_freed: int
    """Given back by all rounds together."""
    rounds: int
    seconds: float
    """Spent on ranking, deciding and moving."""
    replay_tokens: int = 0
    """Tokens computed to repeat the context behind itself, where the policy's score asks for that."""
    replay_seconds: float = 0.0
    """Their share of the time of the steps that they were computed in."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, and what follows from them."""
        kept = [list(layer) for layer in self.kept]
        return asdict(self) | {"kept": kept, "mean_kept": self.mean_kept, "compression": self.compression}

    @property
    def mean_kept(self) -> float:
        """KVs per row."""
        rows = [kvs for layer in self.kept for kvs in layer]
        return sum(rows) / len(rows)

    @property
    def compression(self) -> float:
        """Tokens per KV kept in a row on average; 1 where nothing was taken."""
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
    """The stop string or stop token id that ended it; None for the model's own end of text."""
    eviction: EvictionReport | None = None
    """None while the answer runs, and where no eviction was asked for."""
    error: str | None = None
    """With "error": what went wrong while it was computed. Text and tokens are those from before."""


@dataclass
class RequestOutput:
    """A request and its answers so far; `outputs` has one entry per sample, in order of `index`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobDict | None] | None = None
    """One entry per prompt token; the first is None, since nothing predicts it."""

    @property
    def error(self) -> str | None:
        """What the first of its answers that failed says; None: none has failed."""
        return next((answer.error for answer in self.outputs if answer.error is not None), None)

    def raise_for_error(self) -> None:
        """For who cannot use a failed answer.

        Raises:
            RequestFailedError: an answer has failed.
        """
        error = self.error
        if error is not None:
            raise RequestFailedError(error)


@dataclass(frozen=True)
class EngineStats:
    """A moment of the engine; the counters run from its start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_bytes_used: int = 0
    kv_bytes_peak: int = 0
    kv_bytes_budget: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed; recomputing after a preemption counts again."""
    generated_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_rounds: int = 0
    """Of eviction, each over one or more requests."""
    replay_tokens: int = 0
    """Computed to repeat contexts behind themselves, where a policy's score asks for that."""
    kv_bytes_freed: int = 0
    """Given back by those rounds."""
    elapsed: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step: schedule, evict, execute, replay, output. Scoring is part of execute."""
