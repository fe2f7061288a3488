"""What is compared: decoding-only eviction at its fastest, the full cache, and eviction while prompts are read too."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.papers.batch_max.config import RULES
from winnow.eviction import PRESETS, Average, EvictionPolicy, KeyDifference, Recency, Score
from winnow.sampling import SamplingParams

EVICT_EVERY = 64
"""The paper's p: tokens between two rounds."""

SCORES: Mapping[str, Score] = MappingProxyType(
    dict(zip(RULES, (Average(), KeyDifference(), PRESETS["winnow"].policy.score, Recency()), strict=True))
)
"""`average` is the paper's own rule (3.2); its loop takes any other as well. `leverage` is what `winnow` scores by."""
CONTROL_RULE = "recency"
"""Keeps the latest KVs. A task that this solves as well tells nothing about a rule."""


@dataclass(frozen=True)
class Method:
    """A policy with a name, and the most KVs that it keeps per row; None: all."""

    name: str
    policy: EvictionPolicy
    max_kvs: int | None

    @property
    def label(self) -> str:
        """Name and size, such as "ED |kv|=65"."""
        return self.name if self.max_kvs is None else f"{self.name} |kv|={self.max_kvs}"

    def params(self, max_tokens: int, *, to_the_end: bool) -> SamplingParams:
        """Greedy, under this policy. `to_the_end`: all of `max_tokens`, past the end of text."""
        decides_itself = self.policy.when.never or self.policy.budget.fixed is not None
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=to_the_end,
            detokenize=not to_the_end,
            eviction=self.policy,
            kv_budget=None if decides_itself else self.max_kvs,
        )


FULL_CACHE = Method("FKV", EvictionPolicy(), None)

_EXTREME = PRESETS["extreme-decode"].policy
# With |kv| = 2 a round comes before every token. The paper found |kv| = 65 slower; here a round costs more than reading
# 64 KVs, so both run and the faster one is what others are compared with.
EXTREME_DECODES = (
    Method("ED", _EXTREME, 2),
    Method("ED", replace(_EXTREME, when=replace(_EXTREME.when, decode_every=EVICT_EVERY)), EVICT_EVERY + 1),
)


def batch_max(rule: str, max_kvs: int) -> Method:
    """Algorithm 1 with p = 64: rows never hold more than `max_kvs` KVs."""
    policy = PRESETS["batch-max"].policy
    assert policy.when.prefill_every == policy.when.decode_every == EVICT_EVERY, "the paper's p"
    return Method(f"BM {rule}", replace(policy, score=SCORES[rule]), max_kvs)
