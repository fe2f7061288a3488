"""Options of the scheduler, its queue, its tenants and of speculation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from winnow.config.option import Effect, option, optional_int
from winnow.errors import ConfigError
from winnow.values.checks import check_choice, check_integer, check_names, check_number, require
from winnow.values.tenants import parse_tenants

METHODS = ("ngram", "draft_model", "mtp")
_REFUSED = ("eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
"""Methods of vLLM's whose heads are trained apart, in files of their own that are not read."""
_FIELD = "speculative_config: "


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where proposed tokens come from, under vLLM's names.

    ngram is prompt lookup: what followed the last tokens where they stood before is proposed to follow them again.
    draft_model asks a smaller model of the same vocabulary. mtp asks heads that the model's own checkpoint brings, or
    an assistant that reads its KVs (Gemma 4).

    Attributes:
        num_speculative_tokens: most tokens proposed in a step.
        prompt_lookup_max, prompt_lookup_min: how many last tokens must be found, the most and the fewest.
        model: the smaller one or the assistant, as `ModelConfig.model`.
        adaptive: as many are proposed as measured steps let expect a gain from, none included; False: always all.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | Path | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method in _REFUSED:
            raise ConfigError(
                f"speculative_config: method must be one of {', '.join(METHODS)}, got {self.method!r}: its heads are "
                "trained apart, in files that are not read"
            )
        check_choice(_FIELD + "method", self.method, METHODS)
        require(isinstance(self.adaptive, bool), _FIELD + "adaptive", "true or false", self.adaptive)
        check_integer(_FIELD + "num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        check_integer(_FIELD + "prompt_lookup_max", self.prompt_lookup_max, 1, 64)
        check_integer(_FIELD + "prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        if self.method != "mtp":
            needs = self.method == "draft_model"
            said = f"{'given' if needs else 'left out'} with method {self.method}"
            require((self.model is not None) == needs, _FIELD + "model", said, self.model)


def parse_speculative(value: Any) -> SpeculativeConfig | None:
    """Read vLLM's speculative_config: JSON text, such a mapping, a `SpeculativeConfig`, or None. Raises ConfigError,
    which names the field and the limit."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config: unreadable JSON: {error}") from None
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    require(isinstance(value, Mapping), "speculative_config", 'an object {"method": "ngram", ...}', value)
    check_names("speculative_config", list(value), [each.name for each in fields(SpeculativeConfig)])
    values = {name: each for name, each in value.items() if each is not None}
    if "model" in values:  # as in vLLM: a model alone is a draft model
        values.setdefault("method", "draft_model")
    if str(values.get("method")).endswith("_mtp"):  # vLLM has a name for each architecture's
        values["method"] = "mtp"
    if values.get("method", "ngram") != "ngram":
        given = [name for name in values if name.startswith("prompt_lookup")]
        require(not given, _FIELD + " and ".join(given), "left out unless method is ngram", values["method"])
    elif "prompt_lookup_max" in values:  # as in vLLM: one bound given is both
        values.setdefault("prompt_lookup_min", values["prompt_lookup_max"])
    elif "prompt_lookup_min" in values:
        values["prompt_lookup_max"] = values["prompt_lookup_min"]
    return SpeculativeConfig(**values)


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
    batch_invariant: bool = option(
        False,
        "cut prompts at multiples of prefill_chunk whatever else runs, so that greedy answers of the whole cache "
        "depend on no other request, to the last bit; on a CPU, without prefix cache and drafts",
        effect=Effect.ALWAYS,
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
    )
    watermark_low: float | None = option(
        None,
        "after a request was held back, none joins until use has fallen to this part of the blocks; left out: "
        "watermark_high, so that requests join as soon as they fit",
        effect=Effect.BATCHES,
    )
    watermark_preempt: float = option(
        1.0,
        "while several run and would decode into more than this part of the blocks, policies compress what they may, "
        "and then requests are preempted; none joins above it",
        effect=Effect.BATCHES,
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
    )

    @property
    def chunk(self) -> int | None:
        """Most tokens that a step computes of one request; None: as many as a step has."""
        return None if self.prefill_chunk is None else min(self.prefill_chunk, self.max_num_batched_tokens)

    def __post_init__(self) -> None:
        check_integer("max_num_seqs", self.max_num_seqs, 1, 65536)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.prefill_chunk is not None:
            check_integer("prefill_chunk", self.prefill_chunk, 1)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if self.aging is not None:
            check_number("aging", self.aging, 1e-3)
        check_number("watermark_high", self.watermark_high, 0.01, 1.0)
        check_number("watermark_preempt", self.watermark_preempt, 0.01, 1.0)
        if self.watermark_low is not None:
            check_number("watermark_low", self.watermark_low, 0.0, 1.0)
            if self.watermark_low > self.watermark_high:
                raise ConfigError(
                    f"watermark_low must be at most watermark_high ({self.watermark_high:g}), "
                    f"got {self.watermark_low:g}"
                )
        object.__setattr__(self, "tenants", parse_tenants(self.tenants))
        object.__setattr__(self, "speculative_config", parse_speculative(self.speculative_config))
        if self.batch_invariant:
            require(
                self.speculative_config is None, "speculative_config", "left out with batch_invariant", "one"
            )
            most = self.max_num_batched_tokens - self.max_num_seqs + 1
            if self.prefill_chunk is None or self.prefill_chunk > most:
                raise ConfigError(
                    f"prefill_chunk must be at most {most} with batch_invariant (max_num_batched_tokens less all other "
                    f"sequences' tokens), got {self.prefill_chunk}"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), so that every running "
                f"request can take a step, got {self.max_num_batched_tokens}"
            )
