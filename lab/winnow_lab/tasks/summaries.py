"""Summaries of texts behind worked examples: SciTLDR (arXiv:2004.15011), or CNN/DM and alike from files."""

from dataclasses import replace

from winnow_lab.evaluate.tasks.files import Record
from winnow_lab.tasks.shots import ShotsTask

_TEXTS = ("article", "source")
"""Fields of the text, the first that a row has: of CNN/DM, of SciTLDR."""
_SUMMARIES = ("highlights", "target")


def _lines(row: Record, fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return the field's text, or its texts, each on one line."""
    field = next((name for name in fields if name in row.fields), fields[0])
    texts = row.texts(field) if isinstance(row.fields.get(field), list) else (row.text(field),)
    return tuple(" ".join(text.split()) for text in texts)


def _asked(row: Record) -> str:
    return f"Text: {' '.join(_lines(row, _TEXTS))}\nSummary:"


def _answers(row: Record) -> tuple[str, ...]:
    return _lines(row, _SUMMARIES)


SUMMARIES = ShotsTask(
    "summaries of a text behind worked examples; ROUGE-L, the best of several references",
    name="summaries",
    published="in SciTLDR-Data/SciTLDR-A of allenai/scitldr; rows of article and highlights (CNN/DM) do as well",
    metric="first-line-longbench-rouge-l",
    ask=_asked,
    answers=_answers,
    shots=4,
    answer_tokens=128,
    stop=("\nText:",),
    train=False,
)
SUMMARIES_ROUGE_2 = replace(
    SUMMARIES, summary="summaries of a text behind worked examples; ROUGE-2", metric="first-line-rouge-2"
)
