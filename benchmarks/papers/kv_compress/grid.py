"""What is measured: contexts, compressions and policies, all within the same KV memory."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from winnow.bench.lists import integers, numbers
from winnow.config import option
from winnow.errors import ConfigError, known_names
from winnow.eviction import PRESETS

FULL = "full"
WHOLE_PROMPT = "kv-compress"
"""Rounds after the prompt, which has to fit whole, and before a preemption: the paper's integration."""
P_AND_D = "kv-compress-pd"
"""Rounds within the prompt and while decoding too, so that a prompt takes its chunk on top of its budget."""

# Prompt tokens for each token of an answer, where nothing else is asked for.
_PROMPT_PER_ANSWER = 8


@dataclass(frozen=True)
class Cell:
    """Work that is timed: all requests of a context, under one policy at one compression.

    Attributes:
        context: tokens of a prompt, about.
        preset: a key of `winnow.eviction.PRESETS`.
        compression: tokens of a prompt per KV kept, before the floor.
        prefill_only: whether answers end with their first token: what is left is the time of the prompts.
    """

    context: int
    preset: str = FULL
    compression: float = 1.0
    prefill_only: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What a request asks of eviction."""
        return {} if self.preset == FULL else {"eviction": self.preset, "compression": self.compression}


@dataclass(frozen=True)
class Grid:
    """The cells, and the work in each.

    Raises:
        ConfigError: a value is out of range.
    """

    contexts: tuple[int, ...] = option(
        (1024, 2048, 3584), "tokens of a prompt with its question, commas between", parse=integers
    )
    compressions: tuple[float, ...] = option(
        (1.0, 4.0, 16.0, 64.0),
        "tokens of a prompt per KV kept, before the floor; commas between; the full cache is always measured",
        parse=numbers,
    )
    whole: str = option(WHOLE_PROMPT, "preset whose rounds come after the prompt")
    p_and_d: str = option(P_AND_D, "preset whose rounds come within the prompt and while decoding too (P&D)")
    requests: int = option(32, "requests of a cell, all submitted at once")
    new_tokens: int | None = option(
        None,
        "tokens of each answer, greedy; the end of text does not end it; left out: an eighth of the context",
        parse=int,
    )
    kv_seqs: int = option(1, "KV memory, as whole sequences of the longest context")
    repeat: int = option(1, "times; all cells are measured once, then all of them again")
    prompt_seed: int = option(0, "of the prompts")

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("kv_seqs", 1), ("repeat", 1), ("prompt_seed", 0)):
            _require(name, getattr(self, name), least)
        if self.new_tokens is not None:
            _require("new_tokens", self.new_tokens, 2)
        for name in ("contexts", "compressions"):
            values = getattr(self, name)
            object.__setattr__(self, name, tuple(sorted(set(values))))
            if not values:
                raise ConfigError(f"{name} must hold at least one number")
        _require("contexts", self.contexts[0], 16)
        for name in ("whole", "p_and_d"):
            preset = getattr(self, name)
            if preset not in PRESETS:
                raise ConfigError(
                    f"{name} must be an eviction preset, got {preset!r}; {known_names(preset, PRESETS)}"
                )
        if self.whole == self.p_and_d:
            raise ConfigError(f"whole and p_and_d must be two presets, got {self.whole!r} for both")
        for compression in self.compressions:
            if not 1.0 <= compression < float("inf"):
                raise ConfigError(f"compressions must be finite numbers of at least 1, got {compression:g}")

    @property
    def most_compressed(self) -> float:
        return self.compressions[-1]

    @property
    def policies(self) -> tuple[str, str]:
        """The presets that stand side by side."""
        return self.whole, self.p_and_d

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.contexts[-1] + self.answer_tokens(self.contexts[-1])

    def answer_tokens(self, context: int) -> int:
        """Tokens of each answer to prompts of that length."""
        return max(context // _PROMPT_PER_ANSWER, 2) if self.new_tokens is None else self.new_tokens

    def cells(self) -> Iterator[Cell]:
        """All of them, in the order in which they are measured: what is compared stands close together.

        The longest context comes first: what does not fit is found at once.
        """
        for context in reversed(self.contexts):
            yield Cell(context, prefill_only=True)
            yield Cell(context)
            yield from self.compressed(context)
            if self.most_compressed > 1:
                yield Cell(context, self.p_and_d, self.most_compressed, prefill_only=True)

    def compressed(self, context: int) -> Iterator[Cell]:
        """The cells of a context that evict and answer."""
        for compression, preset in product(self.compressions, self.policies):
            if compression > 1:
                yield Cell(context, preset, compression)

    def settings(self) -> dict[str, Any]:
        """What runs must share to be compared. How often they are repeated is not among it."""
        told = asdict(self)
        del told["repeat"], told["new_tokens"]
        told["answer_tokens"] = [self.answer_tokens(context) for context in self.contexts]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")
