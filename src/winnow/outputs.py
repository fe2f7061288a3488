"""What a request gives back. Names and shapes as vLLM users know them."""

from dataclasses import dataclass, field

from winnow.sampling import Logprob

LogprobDict = dict[int, Logprob]


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of the engine's clock."""

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


@dataclass
class CompletionOutput:
    """One answer. `finish_reason` is None while it runs, then "stop", "length" or "abort"."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end of text."""


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
    elapsed: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the step: schedule, execute, output."""
