"""HotpotQA's development set, with its distracting paragraphs, as documents and questions."""

from pathlib import Path
from typing import Any

from winnow.errors import DatasetError
from winnow.evaluate.tasks.files import Record, find_file, has_file, read_json_list
from winnow.evaluate.tasks.ruler.documents import DocumentQuestion, DocumentSet

FILE = "hotpot_dev_distractor_v1.json"
_PUBLISHED = "by the project HotpotQA (development set, distractor setting)"


def has_hotpot(directory: Path) -> bool:
    """Whether the file is there."""
    return has_file(directory, FILE)


def find_hotpot(directory: Path | None) -> Path:
    """The file; raises DatasetError where there is none."""
    if directory is None:
        raise DatasetError(f"qa_2 needs --data with the file {FILE}; it is published {_PUBLISHED}")
    return find_file(directory, FILE, _PUBLISHED)


def read_hotpot(path: Path) -> DocumentSet:
    """A document is a title with its paragraph. Those that support the answer are needed, the question's others near.

    Raises:
        DatasetError: the file cannot be read, an entry is malformed, or there is none.
    """
    places: dict[str, int] = {}
    questions = []
    for row in read_json_list(path):
        supporting = {str(title) for title, _ in _pairs(row, "supporting_facts")}
        needed: list[int] = []
        near: list[int] = []
        for title, sentences in _pairs(row, "context"):
            if not isinstance(sentences, list) or not all(isinstance(each, str) for each in sentences):
                row.fail(f"'context': the sentences of {title!r} must be a list of strings")
            place = places.setdefault(f"{title}\n{''.join(sentences)}", len(places))
            (needed if title in supporting else near).append(place)
        if len(needed) < len(supporting):
            row.fail("'supporting_facts' names a title that 'context' does not have")
        questions.append(
            DocumentQuestion(row.text("question"), (row.text("answer"),), tuple(needed), tuple(near))
        )
    if not questions:
        raise DatasetError(f"{path}: no question in it")
    return DocumentSet(tuple(places), tuple(questions))


def _pairs(row: Record, field: str) -> list[tuple[str, Any]]:
    """A field that must be a list of pairs which begin with a title."""
    values = row.entries(field)
    for value in values:
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
            row.fail(f"{field!r} must be a list of pairs that begin with a title")
    return [(title, other) for title, other in values]
