"""Stories of the bAbI tasks: facts, with questions between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from winnow.errors import DatasetError
from winnow_lab.evaluate.tasks.files import read_text


@dataclass(frozen=True)
class StoryQuestion:
    """A question, asked when the first `known` facts of the story have been given."""

    text: str
    answer: str
    known: int


@dataclass(frozen=True)
class Story:
    """Facts and questions, each in their order."""

    facts: tuple[str, ...]
    questions: tuple[StoryQuestion, ...]

    def together(self) -> Iterator[tuple[StoryQuestion, ...]]:
        """Yield the questions in groups that are asked of the same facts."""
        for _, group in groupby(self.questions, key=lambda question: question.known):
            yield tuple(group)


def read_stories(path: Path) -> list[Story]:
    """Return the stories of a file of the bAbI tasks, version 1.2.

    Lines are numbered facts (`1 Mary moved to the hall.`) or questions (`2 Where is Mary?<tab>hall<tab>1`); a story
    begins at number 1.

    Raises:
        DatasetError: the file cannot be read, or a line is malformed.
    """
    stories: list[Story] = []
    facts: list[str] = []
    questions: list[StoryQuestion] = []
    for place, line in enumerate(read_text(path).splitlines(), start=1):
        number, _, text = line.partition(" ")
        if number == "1" and (facts or questions):
            stories.append(Story(tuple(facts), tuple(questions)))
            facts, questions = [], []
        if number != str(len(facts) + len(questions) + 1) or not text.strip():
            raise DatasetError(
                f"{path}, line {place}: expected fact or question {len(facts) + len(questions) + 1} of a story"
            )
        asked, *rest = text.split("\t")
        if not rest:
            facts.append(text.strip())
        elif not rest[0].strip() or not facts:
            raise DatasetError(
                f"{path}, line {place}: expected facts before the question, and its answer behind a tab"
            )
        else:
            questions.append(StoryQuestion(asked.strip(), rest[0].strip(), len(facts)))
    if facts or questions:
        stories.append(Story(tuple(facts), tuple(questions)))
    return stories
