"""Texts made alike before they are compared."""

import re
import string

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def fold(text: str) -> str:
    """Lower case, white space at the ends gone and runs of it joined."""
    return " ".join(text.lower().split())


def without_punctuation(text: str) -> str:
    """The text without ASCII punctuation; what it separated grows together."""
    return text.translate(_PUNCTUATION)


def words_of_answer(text: str) -> list[str]:
    """Words by which answers to questions are compared: lower case, without ASCII punctuation and articles (SQuAD)."""
    return _ARTICLES.sub(" ", without_punctuation(text.lower())).split()
