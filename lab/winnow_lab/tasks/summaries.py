"""Summaries of texts behind worked examples: SciTLDR (arXiv:2004.15011), or CNN/DM and alike from files."""

from dataclasses import replace

from winnow_lab.evaluate.tasks.files import Record
from winnow_lab.tasks.shots import ShotsTask


def _lines(row: Record, *fields: str) -> tuple[str, ...]:
    """The text, or the texts, of the first of the fields that a row has, each on one line."""
    field = next((name for name in fields if name in row.fields), fields[0])
    texts = row.texts(field) if isinstance(row.fields.get(field), list) else (row.text(field),)
    return tuple(" ".join(text.split()) for text in texts)


# Fields of CNN/DM, and of SciTLDR.
SUMMARIES = ShotsTask(
    "summaries of a text behind worked examples; ROUGE-L, the best of several references",
    name="summaries",
    published="in SciTLDR-Data/SciTLDR-A of allenai/scitldr; rows of article and highlights (CNN/DM) do as well",
    metric="first-line-longbench-rouge-l",
    ask=lambda row: f"Text: {' '.join(_lines(row, 'article', 'source'))}\nSummary:",
    answers=lambda row: _lines(row, "highlights", "target"),
    shots=4,
    answer_tokens=128,
    stop=("\nText:",),
    train=False,
)
SUMMARIES_ROUGE_2 = replace(
    SUMMARIES, summary="summaries of a text behind worked examples; ROUGE-2", metric="first-line-rouge-2"
)
