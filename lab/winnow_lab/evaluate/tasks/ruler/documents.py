"""Documents, and questions that some of them answer."""

from dataclasses import dataclass
from pathlib import Path

from winnow_lab.evaluate.tasks.files import read_json_lines


@dataclass(frozen=True)
class DocumentQuestion:
    """A question about documents, which are named by their places in a `DocumentSet`.

    Attributes:
        text: the question.
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
    """Documents of a dataset, each once, and its questions."""

    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]


def read_passages(path: Path) -> DocumentSet:
    """Return lines of `{"question", "answers", "title", "text"}`, each with the passage that answers its question.

    Raises:
        DatasetError: the file cannot be read, or a line is malformed.
    """
    places: dict[str, int] = {}
    questions = []
    for row in read_json_lines(path):
        place = places.setdefault(f"{row.text('title')}\n{row.text('text')}", len(places))
        questions.append(DocumentQuestion(row.text("question"), row.texts("answers"), (place,)))
    return DocumentSet(tuple(places), tuple(questions))
