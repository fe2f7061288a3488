"""Samples, of which every evaluation task is made: a context, and questions about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question, with the answers that count as right.

    Attributes:
        text: follows the context as it stands.
        prefix: what the answer begins with, given to the model: behind the assistant's tag where the prompt goes
            through a chat template, else right behind `text`.
        references: accepted answers; some metrics ask for all of them instead of any.
        metric: a key of `winnow_lab.evaluate.metrics.METRICS`.
        classes: every class name there is, for metrics that need to know.
    """

    text: str
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    prefix: str = ""

    @property
    def plain(self) -> str:
        """Text and prefix: what follows the context where there is no chat template."""
        return self.text + self.prefix


@dataclass(frozen=True)
class Sample:
    """One context and its questions, each asked of the context alone.

    Attributes:
        name: the same in every run with the same settings, and unique within a task.
        category: the row of the task's table that its scores go to.
        context: what a query-agnostic policy may judge; questions follow it directly. May be empty.
        chat: whether the text goes through the model's chat template, as one message of the user.
        length: tokens of prompt and answer together that were asked for, where the task's length is free.
    """

    name: str
    category: str
    context: str
    questions: tuple[Question, ...]
    chat: bool = False
    length: int | None = None
