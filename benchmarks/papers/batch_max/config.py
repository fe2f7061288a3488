"""What `python -m benchmarks.papers batch-max` is asked for."""

from dataclasses import dataclass, fields

from winnow.bench.lists import names
from winnow.config import DTYPES, option, optional_int
from winnow.errors import ConfigError
from winnow.evaluate.demo_tasks import CATEGORIES
from winnow.units import parse_bytes

ALL_TASKS = "all"
_FEWEST_PROMPT_TOKENS = 256
RULES = ("average", "key-difference", "leverage", "recency")
"""What Algorithm 1 may evict by; `benchmarks.papers.batch_max.methods` has the scores."""


@dataclass(frozen=True)
class BatchMaxConfig:
    """Memory, tasks, and how often all is done."""

    kv_memory: int = option(
        32 * 2**20, "memory of the KV cache, the same for every method, such as 32MiB", parse=parse_bytes
    )
    tasks: str = option(ALL_TASKS, f"commas between them; of {', '.join(CATEGORIES)}; or {ALL_TASKS}")
    rules: str = option(
        "average,key-difference,leverage",
        f"what Algorithm 1 evicts by, commas between them; of {', '.join(RULES)}; the paper's is average",
    )
    samples: int = option(
        48, "prompts of each task, which batch sizes must divide; the paper has 960, the same for all methods"
    )
    prompt_tokens: int = option(3584, "tokens of a prompt with its answer, about")
    new_tokens: int = option(512, "tokens of each answer in what is timed; the end of text does not end it")
    within: float = option(3.0, "percent of the full cache's accuracy that a method may lose")
    repeats: int = option(3, "times that everything is timed, in turn; the median counts")
    requests: int = option(12, "prompts of what is timed in Winnow's own scheduler")
    dtype: str = option("bfloat16", "number format of weights and KVs", choices=DTYPES[1:])
    threads: int | None = option(None, "threads of torch; left out: as many as it takes", parse=optional_int)
    seed: int = option(0, "of the prompts")

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_memory", parse_bytes(self.kv_memory, "kv_memory"))
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "seed" else 1
            if type(value) is int and value < least:
                raise ConfigError(f"{field.name} must be at least {least}, got {value}")
        if self.prompt_tokens < _FEWEST_PROMPT_TOKENS:
            raise ConfigError(
                f"prompt_tokens must be at least {_FEWEST_PROMPT_TOKENS}, so that every task has a prompt so short, "
                f"got {self.prompt_tokens}"
            )
        if not 0 <= self.within < 100:
            raise ConfigError(f"within must be at least 0 and below 100, got {self.within:g}")
        _check_names("tasks", self.task_names, tuple(CATEGORIES))
        _check_names("rules", self.rule_names, RULES)
        if self.dtype not in DTYPES[1:]:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES[1:])}, got {self.dtype!r}")

    @property
    def task_names(self) -> tuple[str, ...]:
        """In the order typed."""
        return tuple(CATEGORIES) if self.tasks == ALL_TASKS else names(self.tasks)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """In the order typed."""
        return names(self.rules)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Those that may be used, ascending: the paper's D, the divisors of the number of samples."""
        return tuple(size for size in range(1, self.samples + 1) if self.samples % size == 0)


def _check_names(field: str, typed: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in typed:
        if name not in known:
            raise ConfigError(f"{field} must name some of {', '.join(known)}, got {name!r}")
    if len(set(typed)) < len(typed):
        raise ConfigError(f"{field} must name each once, got {','.join(typed)!r}")
