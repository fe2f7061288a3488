"""Parts of an answer: where its reasoning ends and of how many tokens it is, and where all of it is complete."""

from typing import NamedTuple, Protocol


class AnswerEnd(Protocol):
    """Reader of one answer that says where it ends."""

    def completes(self, text: str) -> bool:
        """Read on. Returns whether the answer is complete with this text."""


class ReasoningMarks(NamedTuple):
    """Marks around the reasoning of one answer.

    Attributes:
        opening: stands before it; empty: the prompt ends within the reasoning.
        closing: stands behind it.
    """

    opening: str
    closing: str


class ReasoningSplitter:
    """Splitter of growing text into reasoning, with its marks and the white space behind it, and what follows.

    Attributes:
        ended: all further text is the answer's own.
        num_tokens: tokens of the reasoning so far, its marks included; 0 where there is none.
    """

    def __init__(self, marks: ReasoningMarks) -> None:
        self.ended = False
        self.num_tokens = 0
        self._opening, self._closing = marks
        self._inside = not self._opening
        self._behind = False
        self._held = (
            ""  # text that may be the opening mark, or the beginning of the closing one that was given out
        )
        self._pushed = 0

    def push(self, text: str) -> tuple[str, str]:
        """Read on by a token. Returns the text that is reasoning, and the text that is not."""
        self._pushed += 1
        given = ""
        if not self._inside and not self._behind:
            self._held += text
            begin = self._held.lstrip()
            if not begin.startswith(self._opening):
                if self._opening.startswith(begin):
                    return "", ""
                return "", self.finish()
            start = len(self._held) - len(begin) + len(self._opening)
            given, text = self._held[:start], self._held[start:]
            self._held, self._inside = "", True
        if self._inside:
            self.num_tokens = self._pushed
            seen = self._held + text
            end = seen.find(self._closing)
            if end < 0:
                self._held = seen[max(0, len(seen) - len(self._closing) + 1) :]
                return given + text, ""
            end += len(self._closing) - len(self._held)
            given, text = given + text[:end], text[end:]
            self._held, self._inside, self._behind = "", False, True
        rest = text.lstrip()
        self.ended = bool(rest)
        return given + text[: len(text) - len(rest)], rest

    def finish(self) -> str:
        """Return what was held back, which is none of the reasoning: no mark follows."""
        held = "" if self._inside else self._held
        self._held, self.ended = "", not self._inside
        return held
