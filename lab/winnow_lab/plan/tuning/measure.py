"""One candidate on some prompts: how far its answers agree with the full cache's, how fast, and with how many bytes."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from winnow.metrics import score
from winnow.outputs import RequestOutput
from winnow.prompts import Prompt
from winnow.sampling import SamplingParams
from winnow_lab.plan.tuning.candidates import Candidate, from_json

if TYPE_CHECKING:
    from winnow.llm import LLM

CONFIDENCE_Z = 1.645
"""Quantile of the standard normal distribution: 95 % on one side."""
_ERROR = 0.05
EXACT, TOKENS = "exact", "tokens"


@dataclass(frozen=True)
class TunePrompt:
    """One of the user's prompts.

    Attributes:
        content: text or token ids; `messages` a conversation in its place.
        references: accepted answers; empty: the full cache's answer is what counts.
        metric: that compares with them, a key of `winnow.metrics.METRICS`.
    """

    content: Prompt | None
    messages: Sequence[Mapping[str, Any]] | None
    params: SamplingParams
    references: tuple[str, ...] = ()
    metric: str = EXACT


@dataclass(frozen=True)
class Answer:
    """Answer of an engine."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Trial:
    """A candidate's run over some prompts.

    Attributes:
        stage: name of the set of prompts.
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
        """New tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Wilson's interval of the mean agreement: each end holds with 95 % confidence, at least."""
        return wilson(self.mean, len(self.agreement))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Trial":
        """Return what `to_json` gave."""
        rest = {name: value for name, value in values.items() if name not in ("candidate", "agreement")}
        return cls(from_json(values["candidate"]), agreement=tuple(values["agreement"]), **rest)


def wilson(mean: float, count: int, looks: int = 1) -> tuple[float, float]:
    """Return Wilson's score interval of a mean of values between 0 and 1, whose variance no other such values exceed.

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
    """Return a bound on the expected loss, 1 - agreement, on one more prompt like `count` calibration prompts.

    Conformal risk control (Angelopoulos et al. 2022): (n * mean loss + 1) / (n + 1), for losses between 0 and 1 that
    grow with compression, of exchangeable prompts. It holds for any distribution.
    """
    return (count * (1 - mean) + 1) / (count + 1)


def prompts_for(mean: float, target: float) -> int | None:
    """Return the calibration prompts with which `risk_bound` would reach 1 - target at this mean; None: none would."""
    excess = mean - target
    return None if excess <= 0 else max(math.ceil(target / excess - 1e-9), 1)


def agreement(prompt: TunePrompt, answer: Answer, full: Answer, kind: str) -> float:
    """Return how far an answer agrees with the full cache's.

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
    pairs = zip(answer.token_ids, full.token_ids, strict=False)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if same is None:
        same = min(len(answer.token_ids), len(full.token_ids))
    return same / longest if longest else 1.0


def run(llm: "LLM", candidate: Candidate, prompts: Sequence[TunePrompt]) -> tuple[list[Answer], float, int]:
    """Answer prompts under a candidate's policy. Returns the answers, seconds, and the most KV bytes in use.

    Raises:
        InvalidRequestError: the policy does not go with a prompt.
        RequestFailedError: a request failed.
    """
    start = time.perf_counter()
    names: list[str] = []
    done: dict[str, RequestOutput] = {}
    peak = 0
    try:
        for prompt in prompts:
            params = replace(prompt.params, n=1, temperature=0.0, **candidate.request)
            if prompt.messages is not None:
                names.append(llm.submit_chat(list(prompt.messages), params, final_only=True))
            else:
                assert prompt.content is not None, "a prompt has one of the two"
                names.append(llm.submit(prompt.content, params, final_only=True))
        while llm.has_unfinished:
            for output in llm.step():
                output.raise_for_error()
                done[output.request_id] = output
            peak = max(peak, llm.stats().kv_bytes_used)
    finally:
        for name in names:  # those of a run that did not come to its end
            if name not in done:
                llm.abort(name)
    seconds = time.perf_counter() - start
    answers = [Answer(tuple(done[name].outputs[0].token_ids), done[name].outputs[0].text) for name in names]
    return answers, seconds, peak
