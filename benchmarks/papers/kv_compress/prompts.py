"""The prompts: tasks with right answers where the model can do them, else random tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from winnow.evaluate.metrics import score
from winnow.evaluate.prompt import PromptMaker
from winnow.evaluate.sample import Question
from winnow.evaluate.settings import settings_for
from winnow.evaluate.tasks.demo import DEMO
from winnow.llm import LLM


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt, and what a right answer to it is. Without a question any answer will do."""

    token_ids: tuple[int, ...]
    question: Question | None = None

    def score(self, answer: Sequence[int], tokenizer: Any) -> float | None:
        """Between 0 and 1; None without a question.

        Only what comes before the model's end of text counts: the engine was told to go on after it.
        """
        if self.question is None:
            return None
        told = list(answer[: self.question.max_tokens])
        if tokenizer.eos_token_id in told:
            told = told[: told.index(tokenizer.eos_token_id)]
        text = tokenizer.decode(told, skip_special_tokens=True)
        return score(self.question.metric, text, self.question.references, self.question.classes)


def task_prompts(llm: LLM, context: int, count: int, seed: int) -> list[TimedPrompt]:
    """The demo tasks in turn, prompts of about `context` tokens with the question last.

    Raises:
        EvaluationError: the model has no tokenizer, or the context is too short for a task.
    """
    each = -(-count // len(DEMO.categories))
    samples = DEMO.samples(settings_for(llm, samples=each, tokens=(context,), seed=seed))
    maker = PromptMaker(llm.tokenizer)
    # They come by category; in turn, every share of them has all categories.
    in_turn = [samples[number::each] for number in range(each)]
    prompts = []
    for sample in [sample for turn in in_turn for sample in turn][:count]:
        [question] = sample.questions
        prompts.append(TimedPrompt(maker.make(sample, question).token_ids, question))
    return prompts


def random_prompts(vocab_size: int, context: int, count: int, seed: int) -> list[TimedPrompt]:
    """Random tokens: for models whose answers mean nothing."""
    rng = random.Random(f"{seed}/{context}")  # noqa: S311
    return [TimedPrompt(tuple(rng.randrange(vocab_size) for _ in range(context))) for _ in range(count)]
