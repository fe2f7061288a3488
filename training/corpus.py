"""The redistributable text that the demo model is trained on, and the books held out for measuring it.

`--data DIR` of the other scripts names a folder that holds the files below, gzipped: plain text (`.txt.gz`), or one
JSON object with a "text" per line (`.jsonl.gz`).
"""

import gzip
import json
import re
from pathlib import Path

TRAINING_PATTERNS = (
    "text_fiction/*.txt.gz",
    "text_textbooks/*.txt.gz",
    "text_factbook/*.txt.gz",
    "text_guides/*.txt.gz",
    "text_speeches/*.jsonl.gz",
    "text_stories/*.jsonl.gz",
    "text_tinyshakespeare/*.txt.gz",
)
HELD_OUT = ("text_textbooks/sociology.txt.gz", "text_guides/rust_book.txt.gz")

MARKUP = re.compile(r"[{}\[\]|<>_*#\\^=`~@]|https?:|www\.|\s-\s*$")
# A name cut after an initial, or an abbreviation, is no sentence's end.
CUT_SHORT = re.compile(r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|vs|etc|No)\.$")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]?\s+(?=[\"'(]?[A-Z])")
# Typographic quotation marks, dashes and spaces become their plain ASCII forms.
PLAIN = str.maketrans(
    {
        "\u201c": '"',
        "\u201d": '"',
        "\u2019": "'",
        "\u2018": "'",
        "\u2014": " - ",
        "\u2013": "-",
        "\u00a0": " ",
        "\u2026": "...",
    }
)


def training_files(data: Path) -> list[Path]:
    """Every training file below `data`, sorted; raises FileNotFoundError where a pattern has none."""
    files: list[Path] = []
    for pattern in TRAINING_PATTERNS:
        found = sorted(data.glob(pattern))
        if not found:
            raise FileNotFoundError(f"no file {pattern} below {data}")
        files += [path for path in found if str(path.relative_to(data)) not in HELD_OUT]
    return files


def held_out_files(data: Path) -> list[Path]:
    """The books that are never trained on."""
    return [data / name for name in HELD_OUT]


def read_paragraphs(path: Path) -> list[str]:
    """Paragraphs of one file, white space joined and typographic marks made plain."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = "\n".join(json.loads(line)["text"] for line in file) if ".jsonl" in path.name else file.read()
    lines = (" ".join(line.translate(PLAIN).split()) for line in text.split("\n"))
    return [line for line in lines if line]


def sentences(paths: list[Path]) -> list[str]:
    """The clean sentences of some files, in order."""
    return [sentence for path in paths for sentence in clean_sentences(read_paragraphs(path))]


def clean_sentences(paragraphs: list[str]) -> list[str]:
    """Whole sentences of 6 to 30 words without markup, in order, each once."""
    kept: dict[str, None] = {}
    for paragraph in paragraphs:
        for sentence in SENTENCE_END.split(paragraph):
            if is_clean(sentence):
                kept.setdefault(sentence)
    return list(kept)


def is_clean(sentence: str) -> bool:
    """Whether a sentence can stand in a haystack: a capital first, a full stop last, few signs that are not words."""
    if not 6 <= len(sentence.split()) <= 30 or MARKUP.search(sentence) or CUT_SHORT.search(sentence):
        return False
    if not sentence[0].isupper() or sentence[-1] not in ".!?" or sentence.count('"') % 2:
        return False
    letters = sum(character.isalpha() or character == " " for character in sentence)
    return sentence.isascii() and letters >= 0.9 * len(sentence)
