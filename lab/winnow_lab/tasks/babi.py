"""The 20 bAbI tasks as one task, each a category."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.draws import chosen, worked_examples
from winnow_lab.evaluate.tasks.files import find_file
from winnow_lab.evaluate.tasks.task import TaskSettings
from winnow_lab.tasks import DATA
from winnow_lab.tasks.stories import Story, StoryQuestion, read_stories

_NAMES = (
    "single-supporting-fact",
    "two-supporting-facts",
    "three-supporting-facts",
    "two-arg-relations",
    "three-arg-relations",
    "yes-no-questions",
    "counting",
    "lists-sets",
    "simple-negation",
    "indefinite-knowledge",
    "basic-coreference",
    "conjunction",
    "compound-coreference",
    "time-reasoning",
    "basic-deduction",
    "basic-induction",
    "positional-reasoning",
    "size-reasoning",
    "path-finding",
    "agents-motivations",
)
# Enough to show what answers look like; bAbI itself knows no worked examples.
_SHOTS = 2
_ANSWER_TOKENS = 16


class BabiTask:
    """Questions about short stories (arXiv:1502.05698), test split, English, 1,000 questions of each kind in full.

    The context is the story up to the question, behind worked examples from the train split, which show the form of an
    answer: it must be the data's as a whole. Questions between which the story continues have contexts of their own; of
    those asked of the same facts, as many share one as the settings say. About 50 questions of each kind ship with
    Winnow.
    """

    summary = "bAbI's 20 kinds of questions about short stories"
    categories = tuple(f"qa{number}" for number in range(1, len(_NAMES) + 1))

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        return [
            sample
            for category in settings.categories or self.categories
            for sample in _samples(settings, category)
        ]


BABI = BabiTask()


def _samples(settings: TaskSettings, category: str) -> list[Sample]:
    stories = read_stories(_file(settings, category, "test"))
    shots = _SHOTS if settings.shots is None else settings.shots
    examples = read_stories(_file(settings, category, "train")) if shots else []
    rng = random.Random(f"{settings.seed}/{category}")
    samples = []
    for story, number, asked in chosen(rng, list(_asked(stories, settings.questions)), settings.samples):
        name = f"{category}/{number}"
        drawn = worked_examples(random.Random(f"{settings.seed}/{name}"), examples, shots)
        samples.append(
            Sample(
                name=name,
                category=category,
                context="".join(map(_worked, drawn)) + _told(story, asked[0]),
                questions=tuple(map(_question, asked)),
            )
        )
    return samples


def _asked(stories: Sequence[Story], most: int) -> Iterator[tuple[Story, str, tuple[StoryQuestion, ...]]]:
    for place, story in enumerate(stories, start=1):
        first = 1
        for group in story.together():
            for start in range(0, len(group), most):
                asked = group[start : start + most]
                yield story, f"{place}/{first}", asked
                first += len(asked)


def _told(story: Story, question: StoryQuestion) -> str:
    return "\n".join(story.facts[: question.known])


def _question(question: StoryQuestion) -> Question:
    return Question(
        text=_text(question),
        references=(question.answer,),
        metric="exact",
        max_tokens=_ANSWER_TOKENS,
        stop=("\n",),
    )


def _text(question: StoryQuestion) -> str:
    return f"\nQuestion: {question.text}\nAnswer:"


def _worked(story: Story) -> str:
    question = story.questions[0]
    return f"{_told(story, question)}{_text(question)} {question.answer}\n\n"


def _file(settings: TaskSettings, category: str, split: str) -> Path:
    name = _NAMES[int(category.removeprefix("qa")) - 1]
    return find_file(
        settings.data or DATA / "babi",
        f"{category}_{name}_{split}.txt",
        "by the project bAbI (tasks 1-20, version 1.2, directory en)",
    )
