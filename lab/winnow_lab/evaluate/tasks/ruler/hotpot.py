"""HotpotQA's development set, with its distracting paragraphs, as documents and questions."""

from collections.abc import Iterator
from pathlib import Path

from winnow.errors import DatasetError
from winnow_lab.evaluate.tasks.files import Record, find_file, has_file, read_json_list
from winnow_lab.evaluate.tasks.ruler.documents import DocumentQuestion, DocumentSet

FILE = "hotpot_dev_distractor_v1.json"
_PUBLISHED = "by the project HotpotQA (development set, distractor setting)"


def has_hotpot(directory: Path) -> bool:
    """Return whether the file is there."""
    return has_file(directory, FILE)


def find_hotpot(directory: Path | None) -> Path:
    """Return the file; raises DatasetError where there is none."""
    if directory is None:
        raise DatasetError(f"qa_2 needs --data with the file {FILE}; it is published {_PUBLISHED}")
    return find_file(directory, FILE, _PUBLISHED)


def read_hotpot(path: Path) -> DocumentSet:
    """Return the documents, each a title with its paragraph, and the questions.

    A question needs all its paragraphs, as in RULER: those that support the answer and those that distract from it.

    Raises:
        DatasetError: the file cannot be read, an entry is malformed, or there is none.
    """
    places: dict[str, int] = {}
    questions = []
    for row in read_json_list(path):
        paragraphs = [f"{title}\n{text}" for title, text in _paragraphs(row)]
        needed = tuple(places.setdefault(paragraph, len(places)) for paragraph in paragraphs)
        questions.append(DocumentQuestion(row.text("question"), (row.text("answer"),), needed))
    if not questions:
        raise DatasetError(f"{path}: no question in it")
    return DocumentSet(tuple(places), tuple(questions))


def _paragraphs(row: Record) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of the field `context`, pairs of a title and a list of sentences."""
    for pair in row.entries("context"):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            row.fail("'context' must be a list of pairs that begin with a title")
        title, sentences = pair
        if not isinstance(sentences, list) or not all(isinstance(each, str) for each in sentences):
            row.fail(f"'context': the sentences of {title!r} must be a list of strings")
        yield title, "".join(sentences)
