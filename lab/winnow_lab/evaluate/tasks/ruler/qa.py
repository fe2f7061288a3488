"""Questions about a few documents among many (qa_1, qa_2)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Literal

from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.ruler.documents import DocumentQuestion, DocumentSet
from winnow_lab.evaluate.tasks.ruler.recipe import Draw, Prompt

_INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)


@dataclass(frozen=True)
class DocumentQA:
    """The documents that a question needs, shuffled among others; a unit of the haystack is a document.

    Documents near the question come first, then others of the dataset. When all are in, all come again. With several
    questions the documents that each of them needs are there.
    """

    dataset: Literal["squad", "hotpotqa"]
    answer_tokens: int = 32

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """See `Recipe`."""
        source: DocumentSet = getattr(draw.materials, self.dataset)
        asked = _asked(draw, source.questions)
        needed = {place for question in asked for place in question.needed}
        places = _places(draw.rng("others"), len(needed) + size, source, asked)
        draw.rng("order").shuffle(places)
        documents = [
            f"Document {number}:\n{source.documents[place]}" for number, place in enumerate(places, 1)
        ]
        context = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n" + "\n\n".join(documents)
        return Prompt(context, tuple(self._question(question) for question in asked))

    def _question(self, question: DocumentQuestion) -> Question:
        return Question(
            text=f"\n\n{_INSTRUCTION}\n\nQuestion: {question.text}",
            prefix=" Answer:",
            references=question.answers,
            metric="match-part",
            max_tokens=self.answer_tokens,
        )


def _asked(draw: Draw, questions: Sequence[DocumentQuestion]) -> list[DocumentQuestion]:
    """Return the sample's questions: the next ones of an order that all samples share, so that they differ."""
    order = list(shuffled(random.Random(f"{draw.seed}/{draw.recipe}"), len(questions)))
    first = draw.number * draw.questions
    places = [order[(first + more) % len(order)] for more in range(min(draw.questions, len(order)))]
    return [questions[place] for place in places]


def _places(
    rng: random.Random, count: int, source: DocumentSet, asked: Sequence[DocumentQuestion]
) -> list[int]:
    """Return the documents: those needed, those near, others; repeated in another order until there are enough."""
    needed = dict.fromkeys(chain.from_iterable(question.needed for question in asked))
    near = [
        place
        for place in dict.fromkeys(chain.from_iterable(question.near for question in asked))
        if place not in needed
    ]
    rng.shuffle(near)
    known = needed.keys() | near
    everything = len(source.documents)
    far = (place for place in shuffled(rng, everything) if place not in known)
    return list(islice(chain(needed, near, far, cycle(shuffled(rng, everything))), count))
