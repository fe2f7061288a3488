"""Parser of an answer as it grows: one way for answers that come whole and for those that come in pieces."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from winnow.openai.regions import Kind, Region
from winnow.outputs import CompletionOutput

# Characters that are read at a time: a search never passes by much more text than it was asked about.
_STEP = 4096
# With the characters of a pattern itself: one of each class that a pattern may ask for.
_PROBES = " \n\0aA0_<é"

ReadCalls = Callable[[Region, str, bool], list[dict[str, Any]]]
"""Makes OpenAI's calls of a region's text, marks included, and of whether it was closed; ValueError: it is no call."""


class Piece(NamedTuple):
    """Addition of a piece of an answer to its message: text, or a tool call."""

    kind: Kind
    value: Any


@dataclass
class AnswerParser:
    """Parser of one answer into reasoning, content and tool calls.

    The pieces depend on the answer's text alone, not on where it was cut: a mark counts once no further text can change
    it. Joined in their order they are the answer, but for its marks and for white space beside them. Reasoning begins
    before any content; a call ends at the closing mark that stands in no quoted text; what is no call after all is
    content, marks included.

    Attributes:
        regions: those that begin with a mark, as far as the answer may hold them.
        outside: what text outside of them is.
        special_tokens: those that answers show, with their texts. One at the end ends the turn, and is none of the
            message.
        prompt: what the prompt holds of the model's turn.
        most_calls: end the message after this number of further calls; None: read all.
    """

    regions: Sequence[Region]
    outside: Kind
    read_calls: ReadCalls
    special_tokens: Mapping[int, str]
    prompt: InitVar[str] = ""
    most_calls: int | None = None

    def __post_init__(self, prompt: str) -> None:
        self._region: Region | None = None
        self._buffer = ""
        self._num_foreign = 0  # characters of the buffer that are the prompt's
        self._scanned = 0  # characters of a call in the buffer that were looked at
        self._mark = (0, 0)  # where a call's opening mark stands in the buffer
        self._quote: int | None = None
        self._seen: set[str] = set()  # names of the regions that were there
        self._has_content = False
        self._after_mark = False
        self._pieces: list[Piece] = []
        self._feed(prompt)
        self._take_pieces()
        self._num_foreign = len(self._buffer)
        if self._region is None:  # an answer behind a mark of the prompt has none: white space is its own
            self._after_mark = False

    @property
    def is_plain(self) -> bool:
        """All further text is content as it comes."""
        inside = self._region is not None or self.outside is not Kind.CONTENT
        return not (inside or self._buffer or self._after_mark or self._openings())

    @property
    def reasoning(self) -> tuple[Region, bool] | None:
        """The reasoning that the next text belongs to (True), or may begin (False)."""
        if self._region is not None:
            return (self._region, True) if self._region.kind is Kind.REASONING else None
        found = (each for each in self._openings() if each.kind is Kind.REASONING)
        return next(((each, False) for each in found), None)

    def read(self, answer: CompletionOutput) -> list[Piece]:
        """Read an answer, or what is new of it, and its end if it has ended; return what is certain."""
        if answer.finish_reason is None:
            self._feed(answer.text)
            return self._take_pieces()
        end = ""
        if answer.token_ids and not isinstance(answer.stop_reason, str):
            end = self.special_tokens.get(answer.token_ids[-1], "")
        self._feed(answer.text.removesuffix(end))
        self._read(ended=True)
        if self._in_call and end and answer.text.endswith(end):  # it may close the call
            self._buffer += end
            self._read(ended=True)
            if self._in_call:
                self._buffer = self._buffer.removesuffix(end)
        if self._in_call:
            self._end_call(len(self._buffer), closed=False)
        return self._take_pieces()

    def completes(self, text: str) -> bool:
        """Read on. Returns whether the message is complete: it holds as many calls as it may."""
        self._feed(text)
        region = self._region if self._in_call else None
        if region is not None and region.closing is None and text.rstrip().endswith(("}", "]")):
            with suppress(ValueError):
                self.read_calls(region, self._buffer[self._mark[0] :], False)
                return self.most_calls is not None
        return self.most_calls == 0

    def _feed(self, text: str) -> None:
        for start in range(0, len(text), _STEP):
            self._buffer += text[start : start + _STEP]
            self._read(ended=False)

    @property
    def _in_call(self) -> bool:
        return self._region is not None and self._region.kind is Kind.CALLS

    def _take_pieces(self) -> list[Piece]:
        found, self._pieces = self._pieces, []
        return found

    def _openings(self) -> list[Region]:
        return [
            each
            for each in self.regions
            if each.kind is not Kind.REASONING
            or (not self._has_content and (each.repeats or each.name not in self._seen))
        ]

    def _read(self, *, ended: bool) -> None:
        while self.most_calls != 0:
            if self._region is None:
                more = self._read_outside(ended)
            elif self._region.kind is Kind.CALLS:
                more = self._read_call(self._region, ended)
            else:
                more = self._read_region(self._region, ended)
            if not more:
                return
        self._buffer = ""

    def _read_outside(self, ended: bool) -> bool:
        openings = self._openings()
        patterns = [each.opening for each in openings if each.opening is not None]
        index, match, safe = self._find(patterns, 0, ended)
        if match is not None and openings[index].kind is Kind.REASONING:
            has_text = self.outside is Kind.CONTENT and bool(self._buffer[: match.start()].strip())
            self._has_content = has_text
            if has_text:
                return True
        # White space before a region is none of the message.
        strips = (match is not None or not ended) and (openings or self._after_mark)
        keep = len(self._buffer[:safe].rstrip()) if strips else safe
        self._text(keep, self.outside)
        if match is None:
            return False
        region = self._region = openings[index]
        self._seen.add(region.name)
        self._mark = (match.start() - keep, match.end() - keep)
        if region.kind is Kind.CALLS:
            self._scanned = self._mark[1]
        else:
            self._drop(self._mark[1])
            self._after_mark = region.kind is Kind.REASONING
        return True

    def _read_region(self, region: Region, ended: bool) -> bool:
        patterns = [] if region.closing is None else [region.closing]
        _, match, safe = self._find(patterns, 0, ended)
        keep = len(self._buffer[:safe].rstrip()) if region.kind is Kind.REASONING else safe
        self._text(keep, region.kind, str.lstrip)
        if match is None:
            return False
        self._drop(match.end() - keep)
        self._region, self._after_mark = None, True
        return True

    def _read_call(self, region: Region, ended: bool) -> bool:
        if region.refuses(self._buffer[self._mark[1] : self._mark[1] + _STEP]):
            self._region = None
            self._text(self._mark[1], Kind.CONTENT)
            return True
        while True:
            if self._quote is not None:
                closing = [region.quotes[self._quote].closing]
                _, match, self._scanned = self._find(closing, self._scanned, ended)
                if match is None:
                    return False
                self._scanned = match.end()
                if "escape" not in match.groupdict() or match["escape"] is None:
                    self._quote = None
                continue
            closing = [] if region.closing is None else [region.closing]
            patterns = [*(each.opening for each in region.quotes), *closing]
            index, match, self._scanned = self._find(patterns, self._scanned, ended)
            if match is None:
                return False
            if index == len(region.quotes):
                self._end_call(match.end(), closed=True)
                return True
            self._scanned, self._quote = match.end(), index

    def _end_call(self, end: int, *, closed: bool) -> None:
        """Read a call that ends at `end`: content if it is none."""
        region, self._region, self._quote = self._region, None, None
        assert region is not None
        try:
            calls = self.read_calls(region, self._buffer[self._mark[0] : end], closed)
        except ValueError:
            self._text(end, Kind.CONTENT)
            return
        self._drop(end)
        if self.most_calls is not None:
            calls = calls[: self.most_calls]
            self.most_calls -= len(calls)
        self._pieces += [Piece(Kind.CALLS, call) for call in calls]
        self._after_mark = True

    def _find(
        self, patterns: Sequence[regex.Pattern[str]], start: int, ended: bool
    ) -> tuple[int, "regex.Match[str] | None", int]:
        """Return the first mark from `start` on, the longest of several: its pattern's index, the match, and where it
        stands; without a match, where one may still begin."""
        found: tuple[int, regex.Match[str]] | None = None
        safe = len(self._buffer)
        for index, pattern in enumerate(patterns):
            match = pattern.search(self._buffer, start, partial=not ended)
            if match is None:
                continue
            if not ended and (match.partial or _may_grow(pattern, self._buffer[match.start() :])):
                safe = min(safe, match.start())
            elif found is None or (match.start(), -match.end()) < (found[1].start(), -found[1].end()):
                found = index, match
        if found is None or (found[1].start() >= safe and not ended):
            return 0, None, safe
        return *found, found[1].start()

    def _text(self, end: int, kind: Kind, strip: Callable[[str], str] | None = None) -> None:
        """Take text off the buffer; what is the prompt's is no piece."""
        text = self._buffer[min(self._num_foreign, end) : end]
        self._drop(end)
        if self._after_mark:
            text = _without_blank_lines(text) if strip is None else strip(text)
            self._after_mark = not text
        self._has_content = self._has_content or (kind is Kind.CONTENT and bool(text.strip()))
        if text and kind is not Kind.OTHER:
            self._pieces.append(Piece(kind, text))

    def _drop(self, end: int) -> None:
        self._buffer = self._buffer[end:]
        self._num_foreign = max(0, self._num_foreign - end)


def _may_grow(pattern: regex.Pattern[str], text: str) -> bool:
    """Return whether more text may make a mark, with which `text` begins, another."""
    found = pattern.fullmatch(text, partial=True)
    return found is not None and (found.partial or _can_be_longer(pattern, text))


@lru_cache(256)
def _can_be_longer(pattern: regex.Pattern[str], mark: str) -> bool:
    return any(pattern.fullmatch(mark + each, partial=True) for each in {*pattern.pattern, *_PROBES})


def _without_blank_lines(text: str) -> str:
    """Return the text without white space before it, but for the indentation of a line of its own."""
    rest = text.lstrip()
    space = text[: len(text) - len(rest)]
    return space[space.rfind("\n") + 1 :] + rest if rest and "\n" in space else rest
