"""Candidates of a search; one of them on some prompts: how its answers agree with the full cache's, how fast, in how
many bytes."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from winnow.config import FULL, EvictionConfig
from winnow.eviction import find_preset, resolve_policy
from winnow.prompt.prompts import Prompt
from winnow.sampling import SamplingParams
from winnow_lab.bench.answering import run_all
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import common_length

if TYPE_CHECKING:
    from winnow.llm import LLM

PRESETS = (
    "winnow",
    "winnow-seen",
    "leverage",
    "kv-compress",
    "kv-compress-pd",
    "snapkv",
    "ada-snapkv",
    "winnow-keys",
    "streaming",
)
"""Tried where the user names none: one or two of each kind that needs no files of its own."""
CONFIDENCE_Z = 1.645
"""Quantile of the standard normal distribution: 95 % on one side."""
_ERROR = 0.05
EXACT, TOKENS = "exact", "tokens"


@dataclass(frozen=True, order=True)
class Candidate:
    """Options of an engine. `compression` None: the policy takes none; `kv_cache_dtype` auto: the model's format."""

    eviction: str
    compression: float | None
    max_num_seqs: int
    kv_cache_dtype: str = "auto"

    @property
    def engine(self) -> dict[str, Any]:
        """Options that an engine is opened with; those of requests are `request`."""
        options: dict[str, Any] = {"max_num_seqs": self.max_num_seqs}
        return options if self.kv_cache_dtype == "auto" else options | {"kv_cache_dtype": self.kv_cache_dtype}

    @property
    def request(self) -> dict[str, Any]:
        amount = {} if self.compression is None else {"compression": self.compression}
        return {"eviction": self.eviction} | amount

    def __str__(self) -> str:
        parts = [self.eviction] if self.compression is None else [self.eviction, f"{self.compression:g}x"]
        stored = [] if self.kv_cache_dtype == "auto" else [self.kv_cache_dtype]
        return ", ".join([*parts, f"{self.max_num_seqs} at once", *stored])


def candidates(
    presets: Sequence[str] = PRESETS,
    compressions: Sequence[float] = (2.0, 4.0, 8.0),
    batches: Sequence[int] = (64,),
    kv_dtypes: Sequence[str] = ("auto",),
) -> list[Candidate]:
    """All combinations, and the full cache with each batch; policies that decide how much they keep stand once."""
    for rate in compressions:
        EvictionConfig(compression=rate)

    def policies() -> Iterator[tuple[str, float | None]]:
        yield FULL, None
        for name in presets:
            find_preset(name)
            takes = resolve_policy(EvictionConfig(eviction=name)).takes_amount
            yield from ((name, rate) for rate in (compressions if takes else (None,)))

    found = {
        Candidate(name, rate, batch, kv_dtype)
        for name, rate in policies()
        for batch in batches
        for kv_dtype in kv_dtypes
    }
    return sorted(found, key=str)


@dataclass(frozen=True)
class TunePrompt:
    """One of the user's prompts.

    Attributes:
        content: text or token ids; `messages` a conversation in its place.
        references: accepted answers; empty: the full cache's answer is what counts.
        metric: that compares with them, a key of `winnow_lab.evaluate.metrics.METRICS`.
    """

    content: Prompt | None
    messages: Sequence[Mapping[str, Any]] | None
    params: SamplingParams
    references: tuple[str, ...] = ()
    metric: str = EXACT


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Trial:
    """A candidate's run over some prompts.

    Attributes:
        agreement: of each prompt, between 0.0 and 1.0.
        seconds: to answer all of them, submitted at once.
        kv_bytes: most that were in use after a step.
        error: why there was no run; agreement is empty then.
    """

    candidate: Candidate
    stage: str
    agreement: tuple[float, ...] = ()
    seconds: float = 0.0
    output_tokens: int = 0
    kv_bytes: int = 0
    error: str | None = None

    @property
    def mean(self) -> float:
        """Mean agreement; 0.0 where there was no run."""
        return statistics.fmean(self.agreement) if self.agreement else 0.0

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Wilson's interval of the mean agreement: each end holds with 95 % confidence, at least."""
        return wilson(self.mean, len(self.agreement))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Trial":
        own = {"candidate": Candidate(**values["candidate"]), "agreement": tuple(values["agreement"])}
        return cls(**{**values, **own})


def wilson(mean: float, count: int, looks: int = 1) -> tuple[float, float]:
    """Wilson's score interval of a mean of values between 0 and 1, whose variance no other such values exceed.

    Args:
        looks: how many such means the same values of chance gave, of which this was taken: the error of 5 % is shared
            out over them (Bonferroni).
    """
    if not count:
        return 0.0, 1.0
    z = CONFIDENCE_Z if looks < 2 else NormalDist().inv_cdf(1 - _ERROR / looks)
    z2 = z**2 / count
    middle = (mean + z2 / 2) / (1 + z2)
    half = z / (1 + z2) * math.sqrt(mean * (1 - mean) / count + z2 / (4 * count))
    return min(max(middle - half, 0.0), mean), max(min(middle + half, 1.0), mean)


def risk_bound(mean: float, count: int) -> float:
    """A bound on the expected loss, 1 - agreement, on one more prompt like `count` calibration prompts.

    Conformal risk control (Angelopoulos et al. 2022): (n * mean loss + 1) / (n + 1), for losses between 0 and 1 that
    grow with compression, of exchangeable prompts. It holds for any distribution.
    """
    return (count * (1 - mean) + 1) / (count + 1)


def prompts_for(mean: float, target: float) -> int | None:
    """The calibration prompts with which `risk_bound` would reach 1 - target at this mean; None: none would."""
    excess = mean - target
    return None if excess <= 0 else max(math.ceil(target / excess - 1e-9), 1)


def agreement(prompt: TunePrompt, answer: Answer, full: Answer, kind: str) -> float:
    """How far an answer agrees with the full cache's.

    With references: the metric's value, relative to the full cache's own (1.0 where that has none). Else, by kind:
    exact: 1.0 for the same tokens; tokens: the part of the longer answer up to the first other token.
    """
    if prompt.references:
        best = score(prompt.metric, full.text, prompt.references)
        if best == 0.0:
            return 1.0
        return min(score(prompt.metric, answer.text, prompt.references) / best, 1.0)
    if kind == EXACT:
        return float(answer.token_ids == full.token_ids)
    longest = max(len(answer.token_ids), len(full.token_ids))
    return common_length(answer.token_ids, full.token_ids) / longest if longest else 1.0


def run(llm: "LLM", candidate: Candidate, prompts: Sequence[TunePrompt]) -> tuple[list[Answer], float, int]:
    """Answer prompts under a candidate's policy. Returns the answers, seconds, and the most KV bytes in use."""
    start, used = time.perf_counter(), [0]
    submitted = ((_submit(llm, candidate, prompt), place) for place, prompt in enumerate(prompts))
    outputs = dict(run_all(llm, submitted, lambda: used.append(llm.stats().kv_bytes_used)))
    seconds = time.perf_counter() - start
    found = [outputs[place].outputs[0] for place in range(len(prompts))]
    return [Answer(tuple(each.token_ids), each.text) for each in found], seconds, max(used)


def _submit(llm: "LLM", candidate: Candidate, prompt: TunePrompt) -> str:
    params = replace(prompt.params, n=1, temperature=0.0, **candidate.request)
    if prompt.messages is not None:
        return llm.submit_chat(list(prompt.messages), params, final_only=True)
    assert prompt.content is not None, "a prompt has one of the two"
    return llm.submit(prompt.content, params, final_only=True)
