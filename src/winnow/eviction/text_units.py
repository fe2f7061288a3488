"""Sentences and words of a sequence, for scorers: what is asked of a text is as long as a sentence."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Unit: TypeAlias = Literal["sentence", "word"]

LONGEST_SENTENCE = 64  # tokens after which one without a mark at its end is cut: tables, numbers, lists

_ENDS, _MARKS, _CLOSES, _BLANK_FIRST, _JOINS, _OPEN, _KNOWN = (1 << bit for bit in range(7))
_LINE_ENDS = "\n\r\u2028\u2029。！？；｡"  # noqa: RUF001  # end a sentence whatever follows
_SENTENCE_MARKS = ".!?;…؟۔।"  # noqa: RUF001  # end one where a blank follows, so that 3.14 and self.x stay whole
_CLOSING = "\"')]}»”’*_`"  # noqa: RUF001
_SPACELESS = 0x2E80  # from here on scripts put no blanks between words: each character is one


class TextUnits(NamedTuple):
    """Numbers of each token's sentence and word, counted from 0, int64 [tokens]."""

    sentence: NDArray[np.int64]
    word: NDArray[np.int64]


class TextMarks:
    """Where sentences end and words begin, by the texts of tokens; each token's text is looked at once.

    Args:
        text_of: the text that a token adds, with its leading blank.
        vocab_size: token ids are below it; others, such as one that the host does not know yet, mark nothing.
    """

    def __init__(self, text_of: Callable[[int], str], vocab_size: int) -> None:
        self._text_of = text_of
        self._kinds = np.zeros(vocab_size, dtype=np.uint8)

    def units(self, token_ids: Sequence[int]) -> TextUnits:
        kinds = self._kinds_of(np.asarray(token_ids, dtype=np.int64))
        index = np.arange(len(kinds))
        before = np.concatenate([kinds[:1] * 0, kinds[:-1]])
        marks = (kinds & _MARKS) > 0
        marks[1:] |= ((kinds[1:] & _CLOSES) > 0) & marks[:-1]  # `."` ends a sentence as `.` does
        starts = index == 0
        starts[1:] |= (before[1:] & _ENDS) > 0
        starts[1:] |= marks[:-1] & ((kinds[1:] & _BLANK_FIRST) > 0)
        since = index - np.maximum.accumulate(np.where(starts, index, 0))
        words = starts | ((kinds & _JOINS) == 0) | ((before & _OPEN) == 0)
        return TextUnits(np.cumsum(starts | (since % LONGEST_SENTENCE == 0)) - 1, np.cumsum(words) - 1)

    def _kinds_of(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        known = (ids >= 0) & (ids < len(self._kinds))
        kinds = np.where(known, self._kinds[np.where(known, ids, 0)], _KNOWN).astype(np.uint8)
        if (kinds == 0).any():
            for token in np.unique(ids[kinds == 0]):
                self._kinds[token] = _kind(self._text_of(int(token)))
            kinds[known] = self._kinds[ids[known]]
        return kinds


def _kind(text: str) -> int:
    """Return the marks of a token's text; never 0, which stands for one that was not looked at."""
    kind, inner = _KNOWN, text.strip()
    kind |= _ENDS * bool({*_LINE_ENDS} & {*text})
    kind |= _MARKS * any(mark in text for mark in _SENTENCE_MARKS)
    kind |= _CLOSES * (bool(inner) and all(character in _CLOSING for character in inner))
    kind |= _BLANK_FIRST * text[:1].isspace()
    return kind | _JOINS * _in_word(text[:1]) | _OPEN * _in_word(text[-1:])


def _in_word(character: str) -> bool:
    return character.isalnum() and ord(character) < _SPACELESS
