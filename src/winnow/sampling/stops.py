"""Stop strings, found character by character."""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string found in a piece of text. It may have begun in an earlier piece."""

    stop: str
    end: int  # characters of the piece up to and including the match


class StopMatcher:
    """Matcher of stop strings, none empty, in growing text, whatever pieces it comes in.

    Of several stop strings the one that is complete first wins, and of those complete at the same character the
    longest: the only reading that does not depend on how the text was cut into tokens. Per stop string one automaton of
    Knuth, Morris and Pratt (1977): constant time per character, however long the string or unlucky the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def pending(self) -> int:
        """Number of the last characters that could be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, piece: str, check: bool = True) -> Match | None:
        """Read on, up to the first match. Without `check`, matches that end in this piece do not count, though one may
        begin here."""
        for position, character in enumerate(piece) if self._stops else ():
            found = None
            for index, stop in enumerate(self._stops):
                matched = _advance(stop, self._borders[index], self._matched[index], character)
                if matched == len(stop):
                    found = found or stop  # the longest comes first
                    matched = self._borders[index][matched]
                self._matched[index] = matched
            if found is not None and check:
                return Match(found, position + 1)
        return None


class StopCutter:
    """Cutter of growing text at its first stop string, which holds back an ending that could become one.

    Stop strings that hold one of the `hidden` texts, which the answer leaves out, see all text, in the order of tokens,
    the others what the answer shows; a cut takes from what is shown.

    Args:
        include: keep the stop string at the end of the text.

    Attributes:
        matched: the stop string at which the text was cut; nothing may be fed after it.
    """

    def __init__(self, stops: Sequence[str], include: bool, hidden: Iterable[str] = ()) -> None:
        self.matched: str | None = None
        texts = tuple(hidden)
        special = [stop for stop in stops if any(text in stop for text in texts)]
        self._in_shown = StopMatcher([stop for stop in stops if stop not in special])
        self._in_all = StopMatcher(special)
        self._any, self._include = bool(stops), include
        self._held = ""
        self._is_shown: list[bool] = []  # of each held character

    def feed(self, new: str, check: bool = True, *, shown: bool = True) -> str:
        """Read on. Returns the text that is certain now and was not before. `check` acts as in `StopMatcher.feed`;
        `shown` says that `new` is part of the answer's text."""
        if not self._any:
            return new if shown else ""
        before = len(self._held)
        in_shown = self._in_shown.feed(new, check) if shown else None
        in_all = self._in_all.feed(new, check)
        ended = in_shown is not None or in_all is not None
        if not new or not (ended or before or self._in_shown.pending or self._in_all.pending):
            return new if shown else ""
        self._held += new
        self._is_shown += [shown] * len(new)
        if not ended:
            of_shown = len(self._held) - self._first_of(self._in_shown.pending, len(self._held))
            return self._release(len(self._held) - max(self._in_all.pending, of_shown))
        # The one that is complete first, and of those complete at the same character the longest.
        found = min(filter(None, (in_shown, in_all)), key=lambda match: (match.end, -len(match.stop)))
        end, self.matched = before + found.end, found.stop
        start = end - len(found.stop) if found is in_all else self._first_of(len(found.stop), end)
        text = self._release(start)
        self._held = ""
        return text + (found.stop if self._include else "")

    def finish(self) -> str:
        """Return what was held back, which is certain now: no text follows."""
        return self._release(len(self._held))

    def _first_of(self, count: int, end: int) -> int:
        """Return the index of the first of the last `count` shown characters before `end`."""
        while count:
            end -= 1
            count -= self._is_shown[end]
        return end

    def _release(self, end: int) -> str:
        text = "".join(compress(self._held[:end], self._is_shown))
        self._held = self._held[end:]
        del self._is_shown[:end]
        return text


def _advance(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """Return how much of `stop` the text ends with after one more character, if it ended with `matched` before."""
    while matched and stop[matched] != character:
        matched = borders[matched]
    return matched + (stop[matched] == character)


def _borders(stop: str) -> list[int]:
    """Return per length of a beginning of `stop` the longest shorter beginning that it also ends with."""
    borders = [0, 0]
    for length in range(1, len(stop)):
        borders.append(_advance(stop, borders, borders[length], stop[length]))
    return borders
