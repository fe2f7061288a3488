"""What Batch-Max's experiment compares, and the prompts that it asks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from winnow.cli.flags.engine import model_path
from winnow.config import DTYPES
from winnow.errors import ConfigError
from winnow.eviction import PRESETS, Average, EvictionPolicy, KeyDifference, Recency, Scorer
from winnow.llm import LLM
from winnow.report.fingerprint import model_digest
from winnow.sampling import SamplingParams
from winnow.values.units import parse_bytes
from winnow_lab.bench.answering import fixed_length
from winnow_lab.papers.judged import AskedTask, TimedPrompt, categories_of, judged_prompts
from winnow_lab.study import StudyOptions, flag

_FEWEST_PROMPT_TOKENS = 256
RULES = ("average", "key-difference", "leverage", "recency")
"""What Algorithm 1 may evict by: the keys of `SCORES`."""


@dataclass(frozen=True)
class Options(AskedTask, StudyOptions):
    """Memory, tasks, and how often all is done."""

    kv_memory: int = flag(32 * 2**20, "the same for every method, such as 32MiB", parse=parse_bytes)
    model: str | None = flag(None, "directory or GGUF file (default: the demo model)")
    tasks: tuple[str, ...] = flag((), "categories of --task (default: all)")
    rules: tuple[str, ...] = flag(
        RULES[:3], "what Algorithm 1 evicts by; the paper's is average", choices=RULES
    )
    samples: int = flag(48, "prompts of each task, which batch sizes must divide; the paper has 960", least=1)
    prompt_tokens: int = flag(3584, "of a prompt with its answer, about", least=_FEWEST_PROMPT_TOKENS)
    new_tokens: int = flag(512, "of each timed answer; the end of text does not end it", least=1)
    within: float = flag(3.0, "percent of the full cache's accuracy that a method may lose", least=0)
    repeats: int = flag(3, "times that everything is timed, in turn; the median counts", least=1)
    requests: int = flag(12, "prompts of what is timed in Winnow's own scheduler", least=1)
    dtype: str = flag("bfloat16", "number format of weights and KVs", choices=DTYPES[1:])
    threads: int | None = flag(None, "of torch", least=1)
    seed: int = flag(0, "of the prompts", least=0)
    journal: Path | None = flag(None, "of what each task came to: the same command resumes there")
    name: str = flag("batch_max", "of the files in --output")

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        AskedTask.__post_init__(self)
        object.__setattr__(self, "tasks", categories_of(self, self.tasks, "tasks"))
        if self.within >= 100:
            raise ConfigError(f"--within must be below 100, got {self.within:g}")

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that accuracy depends on."""
        names = ("kv_memory", "rules", "samples", "prompt_tokens", "new_tokens", "within", "dtype", "seed")
        own = {name: getattr(self, name) for name in (*names, "task", "shots")}
        model = model_digest(model_path({"model": self.model}))
        return own | {"rules": list(self.rules), "data": str(self.data), "model": model}

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those that may be used, ascending: the paper's D, the divisors of the number of samples."""
        return tuple(size for size in range(1, self.samples + 1) if self.samples % size == 0)


EVICT_EVERY = 64
"""The paper's p: tokens between two rounds."""

SCORES: Mapping[str, Scorer] = MappingProxyType(
    dict(zip(RULES, (Average(), KeyDifference(), PRESETS["leverage"].policy.score, Recency()), strict=True))
)
"""`average` is the paper's own rule (3.2); its loop takes any other as well. `leverage` is that preset's."""
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
        budget = None if decides_itself else self.max_kvs
        params = fixed_length(max_tokens, eviction=self.policy, kv_budget=budget)
        return params if to_the_end else replace(params, ignore_eos=False, detokenize=True)


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


@dataclass(frozen=True)
class BenchTask:
    """Prompts of one kind."""

    name: str
    asks: tuple[TimedPrompt, ...]

    @property
    def metric(self) -> str:
        """By which its answers are judged; see `winnow.metrics.METRICS`."""
        return self.asks[0].asked.metric

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ask.token_ids) for ask in self.asks)


def make_tasks(config: Options, llm: LLM) -> tuple[BenchTask, ...]:
    """Return the categories of the task, the same prompts for every method."""
    asks: dict[str, list[TimedPrompt]] = {name: [] for name in config.tasks}
    length = config.prompt_tokens
    for prompt in judged_prompts(llm, config, config.tasks, length, config.samples, config.seed, length):
        asks[prompt.category].append(prompt)
    for name, found in asks.items():
        if len(found) != config.samples:
            raise ConfigError(f"samples must be at most {len(found)}, which {name} has, got {config.samples}")
    return tuple(BenchTask(name, tuple(found)) for name, found in asks.items())


def mixed_prompts(tasks: Sequence[BenchTask]) -> list[list[int]]:
    """Prompts of all tasks in turn, for what is timed: speed depends on lengths alone, which all tasks share."""
    columns = zip_longest(*(task.asks for task in tasks))
    return [list(ask.token_ids) for column in columns for ask in column if ask is not None]


def longest_prompts(tasks: Sequence[BenchTask]) -> list[list[int]]:
    """The same, the longest first: who fits with these fits with all."""
    return sorted(mixed_prompts(tasks), key=len, reverse=True)
