"""What is run: the rows of the tables, in their order."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from winnow_lab.evaluate.cell import AGNOSTIC, QUERIES
from winnow_lab.tasks import load_task

TASK_NAMES = ("ruler", "needle", "kv-retrieval", "documents", "gsm8k", "perplexity")
KNOWN_TASKS = (*TASK_NAMES, "demo")
"""`demo` is for the demo model, which answers nothing else."""
WINDOW, GIVEN = 2048, 1024
"""Tokens of a window of text for perplexity, and of its context."""
LABELS = {"aware": "seen", "agnostic": "later"}
"""What query modes are called here: whether the policy has seen the question."""
_QUESTIONS = 20
_DOCUMENT_TOKENS = 4096


@dataclass(frozen=True)
class Work:
    """One row of the tables: prompts of a task that are scored together."""

    name: str
    task: str
    categories: tuple[str, ...]
    tokens: int
    samples: int
    questions: int = 1
    chat: str = "on"
    """Whether prompts go through the model's chat template, as in `EvaluationPlan`."""

    @property
    def queries(self) -> tuple[str, ...]:
        """Many questions on one context are for contexts that are compressed before them."""
        return QUERIES if self.questions == 1 else (AGNOSTIC,)


def works(
    names: Sequence[str], lengths: Sequence[int], samples: int, categories: Sequence[str] | None = None
) -> Iterator[Work]:
    """The rows, in the order in which they are run. `categories` are RULER's; None: all that need no second file."""
    ruler = categories or [name for name in load_task("ruler").categories if name != "qa_2"]
    depths = load_task("needle-chat").categories
    for tokens in lengths if "demo" in names else ():
        for category in load_task("demo").categories:
            yield Work(f"{category} {tokens}", "demo", (category,), tokens, samples, chat="auto")
    for tokens in lengths if "ruler" in names else ():
        for category in ruler:
            yield Work(f"ruler {category} {tokens}", "ruler", (category,), tokens, samples)
    for tokens in lengths:
        if "needle" in names:
            each = math.ceil(samples / len(depths))
            yield Work(f"needle {tokens}", "needle-chat", depths, tokens, each)
        if "kv-retrieval" in names:
            yield Work(f"kv-retrieval {tokens}", "kv-retrieval", ("grown",), tokens, samples)
    if "documents" in names:
        contexts = max(2, math.ceil(samples / 5))  # of many questions each
        yield Work(
            f"documents {_DOCUMENT_TOKENS}", "documents", ("facts",), _DOCUMENT_TOKENS, contexts, _QUESTIONS
        )
    if "gsm8k" in names:
        yield Work("gsm8k flexible", "gsm8k-flexible", ("gsm8k",), max(lengths), samples)
