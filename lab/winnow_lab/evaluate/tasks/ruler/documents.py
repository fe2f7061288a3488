"""Interface of RULER's recipes, what their haystacks are made of, and questions about a few documents (qa_1, qa_2)."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Literal, Protocol

from winnow.errors import DatasetError
from winnow_lab.evaluate.sample import Question
from winnow_lab.evaluate.tasks.draws import shuffled
from winnow_lab.evaluate.tasks.files import (
    Record,
    find_file,
    has_file,
    read_json,
    read_json_lines,
    read_json_list,
    read_text,
    shipped,
)
from winnow_lab.evaluate.tasks.task import CountTokens

# RULER takes version 2.0, whose questions with an answer are those of 1.1.
SQUAD = ("dev-v2.0.json", "dev-v1.1.json")
HOTPOT = "hotpot_dev_distractor_v1.json"
_HOTPOT_PUBLISHED = "by the project HotpotQA (development set, distractor setting)"
_INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about documents, which are named by their places in a `DocumentSet`.

    Attributes:
        answers: any of them is right.
        needed: documents that the answer is found in.
        near: documents about the same things, which are taken first where others stand beside those needed.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class DocumentSet:
    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]


@dataclass(frozen=True)
class Materials:
    """Prose, words and documents, read when a recipe first needs them; `data` is the directory with SQuAD and HotpotQA,
    None where there is none. Raises DatasetError where it has no such file, or a malformed one."""

    data: Path | None

    @cached_property
    def essay(self) -> tuple[str, ...]:
        """Sentences of one book in their order, about 100,000 tokens."""
        return tuple(read_text(shipped("ruler") / "essay.txt.gz").splitlines())

    @cached_property
    def words(self) -> tuple[str, ...]:
        """English words in lower case, each once."""
        return tuple(read_text(shipped("ruler") / "words.txt.gz").split())

    @cached_property
    def squad(self) -> DocumentSet:
        """SQuAD; without `data` its stand-in, passages of Natural Questions."""
        if self.data is None:
            return read_passages(shipped("ruler") / "nq-passages.jsonl.gz")
        name = next((name for name in SQUAD if has_file(self.data, name)), SQUAD[0])
        published = f"by the project SQuAD, as is {SQUAD[1]}, which serves as well"
        return read_squad(find_file(self.data, name, published))

    @cached_property
    def hotpotqa(self) -> DocumentSet:
        """HotpotQA's development set, with its distracting paragraphs."""
        if self.data is None:
            raise DatasetError(
                f"qa_2 needs --data with the file {HOTPOT}; it is published {_HOTPOT_PUBLISHED}"
            )
        return read_hotpot(find_file(self.data, HOTPOT, _HOTPOT_PUBLISHED))


@dataclass(frozen=True)
class Draw:
    """One sample of a recipe before its haystack has a size.

    Attributes:
        tokens: length of prompt and answer together.
        number: of the sample, from 0.
        questions: asked of one context; a recipe may ask fewer.
        count_tokens: tokens of a text, for parts of a prompt that have a length of their own.
    """

    seed: int
    recipe: str
    tokens: int
    number: int
    questions: int
    materials: Materials
    count_tokens: CountTokens

    def rng(self, purpose: str) -> random.Random:
        """A generator for one purpose, which starts anew with every call.

        Each purpose has its own, so that a larger haystack begins like a smaller one and hides the same things.
        """
        return random.Random(f"{self.seed}/{self.recipe}/{self.tokens}/{self.number}/{purpose}")


@dataclass(frozen=True)
class Prompt:
    context: str
    questions: tuple[Question, ...]


class Recipe(Protocol):
    """One of the 13 tasks. The same draw and size make the same prompt."""

    def prompt(self, draw: Draw, size: int) -> Prompt:
        """The prompt whose haystack has `size` units (words, lines, documents) beside what every prompt must hold."""


def read_passages(path: Path) -> DocumentSet:
    """Lines of `{"question", "answers", "title", "text"}`, each with the passage that answers its question."""
    places: dict[str, int] = {}
    questions = []
    for row in read_json_lines(path):
        place = places.setdefault(f"{row.text('title')}\n{row.text('text')}", len(places))
        questions.append(DocumentQuestion(row.text("question"), row.texts("answers"), (place,)))
    return DocumentSet(tuple(places), tuple(questions))


def read_squad(path: Path) -> DocumentSet:
    """Every paragraph as a document, near those of its article; questions without an answer are left out."""
    places: dict[str, int] = {}
    questions = []
    for article in read_json(path).records("data"):
        paragraphs = article.records("paragraphs")
        own = [places.setdefault(paragraph.text("context"), len(places)) for paragraph in paragraphs]
        for place, paragraph in zip(own, paragraphs, strict=True):
            near = tuple(dict.fromkeys(other for other in own if other != place))
            for asked in paragraph.records("qas"):
                answers = tuple(dict.fromkeys(answer.text("text") for answer in asked.records("answers")))
                if answers:
                    questions.append(DocumentQuestion(asked.text("question"), answers, (place,), near))
    if not questions:
        raise DatasetError(f"{path}: no question has an answer")
    return DocumentSet(tuple(places), tuple(questions))


def read_hotpot(path: Path) -> DocumentSet:
    """The documents, each a title with its paragraph, and the questions.

    A question needs all its paragraphs, as in RULER: those that support the answer and those that distract from it.
    """
    places: dict[str, int] = {}
    questions = []
    for row in read_json_list(path):
        needed = tuple(places.setdefault(paragraph, len(places)) for paragraph in _paragraphs(row))
        questions.append(DocumentQuestion(row.text("question"), (row.text("answer"),), needed))
    if not questions:
        raise DatasetError(f"{path}: no question in it")
    return DocumentSet(tuple(places), tuple(questions))


def _paragraphs(row: Record) -> Iterator[str]:
    """Titles and texts of the field `context`, pairs of a title and a list of sentences."""
    for pair in row.entries("context"):
        match pair:
            case [str(title), [*sentences]] if all(isinstance(each, str) for each in sentences):
                yield f"{title}\n{''.join(sentences)}"
            case [str(title), _]:
                row.fail(f"'context': the sentences of {title!r} must be a list of strings")
            case _:
                row.fail("'context' must be a list of pairs that begin with a title")


@dataclass(frozen=True)
class DocumentQA:
    """The documents that a question needs, shuffled among others; a unit of the haystack is a document.

    Documents near the question come first, then others of the dataset. When all are in, all come again. With several
    questions the documents that each of them needs are there.
    """

    dataset: Literal["squad", "hotpotqa"]
    answer_tokens: int = 32

    def prompt(self, draw: Draw, size: int) -> Prompt:
        source: DocumentSet = getattr(draw.materials, self.dataset)
        # The next ones of an order that all samples share, so that they differ.
        order = list(shuffled(random.Random(f"{draw.seed}/{draw.recipe}"), len(source.questions)))
        first = draw.number * draw.questions
        count = min(draw.questions, len(order))
        asked = [source.questions[order[(first + more) % len(order)]] for more in range(count)]
        places = _places(draw.rng("others"), size, source, asked)
        draw.rng("order").shuffle(places)
        documents = [f"Document {n}:\n{source.documents[place]}" for n, place in enumerate(places, 1)]
        context = f"{_INSTRUCTION}\n\nThe following are given documents.\n\n" + "\n\n".join(documents)
        questions = (
            Question(
                f"\n\n{_INSTRUCTION}\n\nQuestion: {each.text}",
                each.answers,
                "match-part",
                self.answer_tokens,
                prefix=" Answer:",
            )
            for each in asked
        )
        return Prompt(context, tuple(questions))


def _places(rng: random.Random, more: int, source: DocumentSet, asked: list[DocumentQuestion]) -> list[int]:
    """The documents needed and `more`: those near, then others; repeated in another order until there are enough."""
    needed = dict.fromkeys(chain.from_iterable(question.needed for question in asked))
    near = dict.fromkeys(chain.from_iterable(question.near for question in asked))
    first = [place for place in near if place not in needed]
    rng.shuffle(first)
    known = needed.keys() | first
    everything = len(source.documents)
    far = (place for place in shuffled(rng, everything) if place not in known)
    found = chain(needed, first, far, cycle(shuffled(rng, everything)))
    return list(islice(found, len(needed) + more))
