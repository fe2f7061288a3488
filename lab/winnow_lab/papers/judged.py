"""Prompts of a task whose answers are judged, for benches that time these answers or choose by them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winnow.config import option
from winnow.errors import ConfigError, known_names
from winnow.llm import LLM
from winnow_lab.evaluate.metrics import score
from winnow_lab.evaluate.prompt import PromptMaker
from winnow_lab.evaluate.requests import until_stop
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.task import settings_for
from winnow_lab.tasks import TASKS, load_task


@dataclass(frozen=True, kw_only=True)
class AskedTask:
    """What is asked.

    Raises:
        ConfigError: there is no such task.
    """

    task: str = option("ruler", f"whose answers are judged: of {', '.join(TASKS)}", parse=str)
    data: Path | None = option(None, "directory with the task's files; left out: those that ship", parse=Path)
    shots: int | None = option(None, "worked examples in front; left out: the task's own", parse=int)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}; {known_names(self.task, TASKS)}")


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt, and what a right answer to it is. Without a question any answer will do."""

    token_ids: tuple[int, ...]
    question: Question | None = None
    category: str = ""

    @property
    def asked(self) -> Question:
        """The question of a prompt that has one."""
        assert self.question is not None, "a random prompt asks nothing"
        return self.question

    def score(self, answer: Sequence[int], tokenizer: Any) -> float | None:
        """Score an answer between 0 and 1; None without a question.

        Only what comes before the model's end of text counts: the engine continues after it.
        """
        if self.question is None:
            return None
        reported = list(answer[: self.question.max_tokens])
        if tokenizer.eos_token_id in reported:
            reported = reported[: reported.index(tokenizer.eos_token_id)]
        return judge(self.question, tokenizer.decode(reported, skip_special_tokens=True))


def judge(question: Question, text: str) -> float:
    """Score a text as an answer, up to the question's first stop string."""
    return score(question.metric, until_stop(text, question.stop), question.references, question.classes)


def categories_of(task: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the categories of a task that are asked for; empty: all.

    Raises:
        ConfigError: the task has no such category.
    """
    known = tuple(load_task(task).categories)
    for name in names:
        if name not in known:
            raise ConfigError(f"--kinds must be of {', '.join(known)}, got {name!r}")
    return tuple(names) or known


def chat_mode(task: str, tokenizer: Any) -> str:
    """Return `EvaluationPlan.chat`: through a model's template, but for tasks that know which samples are messages."""
    knows = task.startswith(("demo", "longbench", "summaries"))
    return "auto" if knows or not getattr(tokenizer, "chat_template", None) else "on"


def judged_prompts(
    llm: LLM, asked: AskedTask, categories: Sequence[str], tokens: int, each: int, seed: int, most: int
) -> Iterator[TimedPrompt]:
    """Yield the prompts of a task by category; chat models get them through their template.

    Args:
        tokens: of a prompt, about, where the task's length is free.
        each: samples of a category.
        most: tokens of prompt and answer together.

    Raises:
        EvaluationError: the model has no tokenizer, or `tokens` are too few for a task.
    """
    settings = settings_for(
        llm,
        samples=each,
        tokens=(tokens,),
        categories=tuple(categories),
        shots=asked.shots,
        data=asked.data,
        seed=seed,
    )
    settings = replace(settings, max_model_len=min(settings.max_model_len, most))
    maker = PromptMaker(llm.tokenizer, chat_mode(asked.task, llm.tokenizer))
    for sample in load_task(asked.task).samples(settings):
        for question in sample.questions:
            yield TimedPrompt(maker.make(sample, question).token_ids, question, sample.category)
