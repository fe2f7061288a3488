"""A needle in a haystack: one fact at a given depth of prose of a given length."""

import random
from dataclasses import dataclass

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks import Haystack, question_suffix
from winnow_lab.evaluate.demo_tasks.words import NAMES
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.in_prose import samples_in_prose
from winnow_lab.evaluate.tasks.task import TaskSettings

DEPTHS = tuple(range(0, 101, 10))
"""Percent of the prose that stands before the needle."""
DEFAULT_SAMPLES = 5
_DIGITS = 4
_ANSWER_ROOM = 8


@dataclass(frozen=True)
class NeedleTask:
    """Pass keys of people, each asked for by the person's name; categories are depths (Kamradt 2023).

    With several questions a context holds a needle for each: the first at the category's depth, the others anywhere.

    Attributes:
        chat: ask as one message of a chat, in a sentence that says what form the answer has, and accept an answer that
            holds the key among other words; else in the form that the demo model was trained on.
    """

    summary: str
    chat: bool = False
    categories: tuple[str, ...] = tuple(f"depth-{depth}" for depth in DEPTHS)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        return samples_in_prose(settings, self.categories, DEFAULT_SAMPLES, self._sample)

    def _sample(
        self, settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
    ) -> Sample:
        rng = random.Random(f"{settings.seed}/needle/{category}/{tokens}/{number}")
        if settings.questions > len(NAMES):
            raise EvaluationError(
                f"--questions must be at most {len(NAMES)} for needles, got {settings.questions}"
            )
        people = rng.sample(NAMES, settings.questions)
        keys = [str(rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for _ in people]
        needles = [f"The pass key of {person} is {key}." for person, key in zip(people, keys, strict=True)]
        questions = tuple(self._question(person, key) for person, key in zip(people, keys, strict=True))
        room = tokens - _ANSWER_ROOM - _DIGITS
        room -= sum(settings.count_tokens(" " + needle) for needle in needles)
        room -= max(settings.count_tokens(question.text) for question in questions)
        prose = haystack.passage(rng, room)
        if not prose:
            raise EvaluationError(f"--tokens {tokens} leaves no room for prose around the needles")
        for needle in needles[1:]:
            prose.insert(rng.randrange(len(prose) + 1), needle)
        prose.insert(_place(prose, int(category.removeprefix("depth-"))), needles[0])
        return Sample(
            name=f"{category}/{tokens}/{number}",
            category=category,
            context=" ".join(prose),
            questions=questions,
            chat=self.chat,
            length=tokens,
        )

    def _question(self, person: str, key: str) -> Question:
        asked = f"What is the pass key of {person}?"
        if self.chat:
            text = f"\n\n{asked} Answer with the number alone."
            return Question(text, (key,), "match-all", max_tokens=_DIGITS + 3 * _ANSWER_ROOM)
        return Question(question_suffix(asked), (key,), "exact", max_tokens=_DIGITS + _ANSWER_ROOM)


def _place(prose: list[str], depth: int) -> int:
    """Return the sentence before which `depth` percent of the letters stand, as near as sentences allow."""
    ends = [0]
    for sentence in prose:
        ends.append(ends[-1] + len(sentence) + 1)
    wanted = ends[-1] * depth / 100
    return min(range(len(ends)), key=lambda place: abs(ends[place] - wanted))


NEEDLE = NeedleTask("a pass key at a given depth of prose, asked as the demo model was taught")
NEEDLE_CHAT = NeedleTask("a pass key at a given depth of prose, asked through the chat template", chat=True)
