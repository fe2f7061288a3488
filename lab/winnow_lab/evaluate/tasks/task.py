"""Interface of a task, and texts of a length that is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Sample

if TYPE_CHECKING:
    from winnow.llm import LLM

CountTokens = Callable[[str], int]
_FIRST_GUESS = 16


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a task: how much of it, and how long.

    Attributes:
        count_tokens: tokens of a text, without special tokens.
        truncate: text, most tokens -> the text, its middle cut out where it has more tokens than that.
        max_model_len: most tokens of a prompt and its answer together that the model takes.
        data: directory with the task's files; None: the sample that ships with Winnow, where there is one.
        samples: of each category; None: as many as the task's own protocol has.
        tokens: lengths of prompt and answer together, for tasks whose length is free.
        questions: asked of one context, for tasks that can.
        shots: worked examples in front, for tasks that have them; None: as many as the task's protocol has.
        categories: only these; empty: all.
        seed: of everything drawn at random.
    """

    count_tokens: CountTokens
    truncate: Callable[[str, int], str]
    max_model_len: int
    data: Path | None = None
    samples: int | None = None
    tokens: tuple[int, ...] = (1024,)
    questions: int = 1
    shots: int | None = None
    categories: tuple[str, ...] = ()
    seed: int = 0


class Task(Protocol):
    @property
    def summary(self) -> str:
        """One line for `winnow eval --help`."""

    @property
    def categories(self) -> tuple[str, ...]:
        """Rows of its table, in their order."""

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """The samples, the same for the same settings; raises DatasetError or EvaluationError."""


def settings_for(llm: "LLM", **options: Any) -> TaskSettings:
    """`TaskSettings` for a model, which needs a tokenizer; `options` are its other fields."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise EvaluationError("an evaluation needs a tokenizer, which the model's directory does not have")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def truncate(text: str, most: int) -> str:
        tokens = encode(text)
        if len(tokens) <= most:
            return text
        front = (most + 1) // 2
        back = tokens[len(tokens) - (most - front) :]
        return str(tokenizer.decode(tokens[:front])) + str(tokenizer.decode(back))

    return TaskSettings(lambda text: len(encode(text)), truncate, llm.max_model_len, **options)


def check_lengths(settings: TaskSettings) -> None:
    """Raise EvaluationError for a length that the model does not take, before texts of it are made."""
    for tokens in settings.tokens:
        if tokens > settings.max_model_len:
            raise EvaluationError(f"--tokens {tokens}: the model takes {settings.max_model_len} at most")


def largest_fitting(cost: Callable[[int], int], room: int) -> int | None:
    """Return a size that fits while the next one does not: `cost(size) <= room < cost(size + 1)`.

    None if size 0 does not fit. Guesses rely on a cost, size -> tokens, that grows without bound and about evenly;
    where it now and then falls, the size found need not be the largest of all that fit.
    """
    at_zero = cost(0)
    if at_zero > room:
        return None
    fits, too_large = 0, None
    guess = _FIRST_GUESS
    while too_large is None or too_large - fits > 1:
        tokens = cost(guess)
        if tokens <= room:
            fits = guess
        else:
            too_large = guess
        step = (room - tokens) * guess // max(1, tokens - at_zero)
        guess = max(guess + step, fits + 1)
        if too_large is not None:
            guess = min(guess, too_large - 1)
    return fits
