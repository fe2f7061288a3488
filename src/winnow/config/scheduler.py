"""Options of the scheduler, its queue and its tenants."""

from dataclasses import dataclass
from typing import Any

from winnow.config.option import Effect, option, optional_int
from winnow.config.speculative import parse_speculative
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_number
from winnow.values.tenants import parse_tenants

SCHEDULING_POLICIES = ("fcfs", "priority", "srtf", "fair", "prefix")


@dataclass(frozen=True)
class SchedulerConfig:
    """Options of scheduling: how many requests and tokens a step may hold."""

    max_num_seqs: int = option(64, "most sequences that hold KVs at the same time", effect=Effect.BATCHES)
    max_num_batched_tokens: int = option(
        2048, "most tokens computed in one step, over all requests", effect=Effect.BATCHES
    )
    prefill_chunk: int | None = option(
        512, "most prompt tokens of one request in one step; none: whole prompts", parse=optional_int
    )
    scheduling_policy: str = option(
        "priority",
        "who is served first: fcfs: who came first; priority: the greater priority, which may park lower ones that "
        "run; srtf: the shortest remaining; fair: the tenant that got the fewest tokens for its weight; prefix: "
        "prompts that begin alike one after the other, for piles of questions about the same texts",
        choices=SCHEDULING_POLICIES,
        effect=Effect.BATCHES,
    )
    aging: float | None = option(
        60.0,
        "seconds of waiting that count as one level of priority, or as 1000 tokens less under srtf, so that no request "
        "waits for ever; none: no aging",
        effect=Effect.BATCHES,
    )
    watermark_high: float = option(
        1.0,
        "requests join others only up to this part of the blocks; the rest is for the growth of those that run",
        effect=Effect.BATCHES,
        engine="paged",
    )
    watermark_low: float | None = option(
        None,
        "after a request was held back, none joins until use has fallen to this part of the blocks; left out: "
        "watermark_high, so that requests join as soon as they fit",
        effect=Effect.BATCHES,
        engine="paged",
    )
    max_queued_requests: int | None = option(
        None, "requests that may wait; further ones are refused; left out: no limit", effect=Effect.NEVER
    )
    max_queued_tokens: int | None = option(
        None,
        "tokens of requests that may wait; further requests are refused, unless none waits; left out: no limit",
        effect=Effect.NEVER,
    )
    tenants: Any = option(
        (),
        'tenants with weight, guarantee, limit and host_limit: a JSON object {"NAME": {"weight": 2}, ...} or the '
        "file of one",
        parse=parse_tenants,
        metavar="JSON",
        effect=Effect.BATCHES,
    )

    speculative_config: Any = option(
        None,
        "propose tokens, and compute them in the same step: what followed the last tokens where they stood before: "
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}; or what a '
        'smaller model of the same vocabulary says: {"method": "draft_model", "model": DIR}; or what heads of its own '
        'checkpoint say, or an assistant (Gemma 4): {"method": "mtp"}; steps are timed, and have as many drafts as pay '
        'at the number of running sequences, also none; "adaptive": false: always all',
        parse=parse_speculative,
        metavar="JSON",
        effect=Effect.BATCHES,
        engine="paged",
    )

    @property
    def chunk(self) -> int | None:
        """Most tokens that a step computes of one request; None: as many as a step has."""
        return None if self.prefill_chunk is None else min(self.prefill_chunk, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, 65536)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        for name in ("prefill_chunk", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.aging is not None:
            check_number("aging", self.aging, 1e-3)
        check_number("watermark_high", self.watermark_high, 0.01, 1.0)
        if self.watermark_low is not None:
            check_number("watermark_low", self.watermark_low, 0.0, 1.0)
            if self.watermark_low > self.watermark_high:
                raise ConfigError(
                    f"watermark_low must be at most watermark_high ({self.watermark_high:g}), "
                    f"got {self.watermark_low:g}"
                )
        object.__setattr__(self, "tenants", parse_tenants(self.tenants))
        object.__setattr__(self, "speculative_config", parse_speculative(self.speculative_config))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"request can take a step, got {self.max_num_batched_tokens}"
            )
