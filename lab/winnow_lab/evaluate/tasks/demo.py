"""Tasks that the demo model was trained for: facts to find in prose, in all its categories."""

import random

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks import CATEGORIES, DemoDocument, Haystack, make_document, question_suffix
from winnow_lab.evaluate.sample import Question, Sample
from winnow_lab.evaluate.tasks.in_prose import samples_in_prose
from winnow_lab.evaluate.tasks.task import TaskSettings

DEFAULT_SAMPLES = 10
# Tokens that may follow beyond the length of the right answer.
_ANSWER_ROOM = 8


class DemoTask:
    """Samples of `winnow_lab.evaluate.demo_tasks` in the prose that ships, at every length asked for."""

    summary = "eight kinds of retrieval in prose, for the demo model"
    categories = tuple(CATEGORIES)

    def samples(self, settings: TaskSettings) -> list[Sample]:
        """See `Task`."""
        return samples_in_prose(settings, self.categories, DEFAULT_SAMPLES, self._sample)

    def _sample(
        self, settings: TaskSettings, haystack: Haystack, category: str, tokens: int, number: int
    ) -> Sample:
        rng = random.Random(f"{settings.seed}/{category}/{tokens}/{number}")
        room = tokens - _ANSWER_ROOM
        try:
            document = make_document(
                category, rng, haystack, settings.count_tokens, room, questions=settings.questions
            )
        except ValueError as error:
            raise EvaluationError(f"--tokens {tokens}: {error}") from None
        return Sample(
            name=f"{category}/{tokens}/{number}",
            category=category,
            context=document.context,
            questions=tuple(_questions(document, settings)),
            length=tokens,
        )


def _questions(document: DemoDocument, settings: TaskSettings) -> list[Question]:
    return [
        Question(
            text=question_suffix(question.text),
            references=(question.answer,),
            metric=document.metric,
            max_tokens=settings.count_tokens(" " + question.answer) + _ANSWER_ROOM,
        )
        for question in document.questions
    ]


DEMO = DemoTask()
