"""SQuAD's development set as documents and questions."""

from collections.abc import Iterator
from pathlib import Path

from winnow.errors import DatasetError
from winnow_lab.evaluate.tasks.files import Record, find_file, has_file, read_json
from winnow_lab.evaluate.tasks.ruler.documents import DocumentQuestion, DocumentSet

# RULER takes version 2.0, whose questions with an answer are those of 1.1.
FILES = ("dev-v2.0.json", "dev-v1.1.json")


def has_squad(directory: Path) -> bool:
    """Return whether one of the files is there."""
    return any(has_file(directory, name) for name in FILES)


def find_squad(directory: Path) -> Path:
    """Return the file; raises DatasetError where there is none."""
    name = next((name for name in FILES if has_file(directory, name)), FILES[0])
    return find_file(directory, name, f"by the project SQuAD, as is {FILES[1]}, which serves as well")


def read_squad(path: Path) -> DocumentSet:
    """Return every paragraph as a document; paragraphs of the same article are near.

    Questions without an answer are left out.

    Raises:
        DatasetError: the file cannot be read, an entry is malformed, or no question has an answer.
    """
    places: dict[str, int] = {}
    questions: list[DocumentQuestion] = []
    for article in read_json(path).records("data"):
        paragraphs = article.records("paragraphs")
        own = [places.setdefault(paragraph.text("context"), len(places)) for paragraph in paragraphs]
        for place, paragraph in zip(own, paragraphs, strict=True):
            near = tuple(dict.fromkeys(other for other in own if other != place))
            questions += [
                DocumentQuestion(text, answers, (place,), near) for text, answers in _answered(paragraph)
            ]
    if not questions:
        raise DatasetError(f"{path}: no question has an answer")
    return DocumentSet(tuple(places), tuple(questions))


def _answered(paragraph: Record) -> Iterator[tuple[str, tuple[str, ...]]]:
    for question in paragraph.records("qas"):
        answers = tuple(dict.fromkeys(answer.text("text") for answer in question.records("answers")))
        if answers:
            yield question.text("question"), answers
