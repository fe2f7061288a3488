"""The tasks: prompts about as long as the context allows beside 512 new tokens, with their right answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from benchmarks.papers.batch_max.config import BatchMaxConfig
from winnow.evaluate.sample import Question
from winnow.evaluate.tasks import TaskSettings, load_task


@dataclass(frozen=True)
class Ask:
    """One prompt and its question."""

    token_ids: tuple[int, ...]
    question: Question


@dataclass(frozen=True)
class BenchTask:
    """Prompts of one kind."""

    name: str
    asks: tuple[Ask, ...]

    @property
    def metric(self) -> str:
        """By which its answers are judged; see `winnow.evaluate.metrics.METRICS`."""
        return self.asks[0].question.metric

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ask.token_ids) for ask in self.asks)


def make_tasks(config: BatchMaxConfig, tokenizer: Any) -> tuple[BenchTask, ...]:
    """The demo model's categories, the same prompts for every method."""

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    settings = TaskSettings(
        count_tokens,
        truncate=lambda text, _: text,  # prompts are made as long as they may be
        max_model_len=config.prompt_tokens,
        samples=config.samples,
        tokens=(config.prompt_tokens,),
        categories=config.task_names,
        seed=config.seed,
    )
    asks: dict[str, list[Ask]] = {}
    for sample in load_task("demo").samples(settings):
        [question] = sample.questions
        token_ids = tuple(tokenizer.encode(sample.context + question.plain))
        asks.setdefault(sample.category, []).append(Ask(token_ids, question))
    return tuple(BenchTask(name, tuple(asks[name])) for name in config.task_names)


def mixed_prompts(tasks: Sequence[BenchTask]) -> list[list[int]]:
    """Prompts of all tasks in turn, for what is timed: speed depends on lengths alone, which all tasks share."""
    columns = zip_longest(*(task.asks for task in tasks))
    return [list(ask.token_ids) for column in columns for ask in column if ask is not None]


def longest_prompts(tasks: Sequence[BenchTask]) -> list[list[int]]:
    """The same, the longest first: who fits with these fits with all."""
    return sorted(mixed_prompts(tasks), key=len, reverse=True)
