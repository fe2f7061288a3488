"""LongBench's prompts: templates filled in, and cut in the middle where they are too long."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Self


@dataclass(frozen=True)
class Template:
    """Text before and after an example's context; `after` holds the field {input}, or no field."""

    before: str
    after: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the template of a text with the field {context}, and {input} behind it or nowhere."""
        before, _, after = text.partition("{context}")
        return cls(before, after)

    def fill(self, context: str, query: str) -> tuple[str, str]:
        """Return the context and question of the prompt: the question is all that follows the example's context."""
        return self.before + context, self.after.replace("{input}", query)


def cut_middle(
    context: str, question: str, truncate: Callable[[str, int], str], most: int
) -> tuple[str, str]:
    """Return the context and question, the middle of both together cut out so that at most that many tokens stay.

    The cut falls into the context, unless the question alone is longer than half of what may stay; then what is left of
    its end is the question.
    """
    whole = context + question
    cut = truncate(whole, most)
    if cut == whole:
        return context, question
    start = _start_of_end(cut, question)
    return cut[:start], cut[start:]


def _start_of_end(text: str, end: str) -> int:
    """Return where `end`, or as much of its end as is there, begins in a text that ends with it.

    White space is not compared: some tokenizers change it when they turn tokens back into text.
    """
    places = [place for place in range(len(text)) if not text[place].isspace()]
    marks = [mark for mark in end if not mark.isspace()]
    pairs = zip(reversed(places), reversed(marks), strict=False)
    same = [place for place, _ in takewhile(lambda pair: text[pair[0]] == pair[1], pairs)]
    start = same[-1] if same else len(text)
    for _ in range(len(end) - len(end.lstrip())):
        if start > 0 and text[start - 1].isspace():
            start -= 1
    return start
