"""Stop strings, found character by character."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string found in a piece of text.

    Attributes:
        stop: the string.
        end: characters of the piece up to and including the match. It may have begun in an earlier piece.
    """

    stop: str
    end: int


class StopMatcher:
    """Matcher of stop strings in growing text, whatever pieces it comes in.

    Of several stop strings the one that is complete first wins, and of those complete at the same character
    the longest: the only reading that does not depend on how the text was cut into tokens.

    Per stop string one automaton of Knuth, Morris and Pratt (1977): constant time per character, however long
    the string or unlucky the text.

    Args:
        stops: the strings, none empty.
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
        """Read on, up to the first match.

        Args:
            piece: the text that follows.
            check: False: matches that end in this piece do not count, though one may begin here.
        """
        for position, character in enumerate(piece):
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


class PlainCutter:
    """Cutter of growing text at its first stop string, which holds back an ending that could become one.

    Args:
        stops: the strings, none empty.
        include: keep the stop string at the end of the text.

    Attributes:
        matched: the stop string at which the text was cut; nothing may be fed after it.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.matched: str | None = None
        self._matcher = StopMatcher(stops)
        self._include = include
        self._held = ""

    def feed(self, new: str, check: bool = True) -> str:
        """Read on. Returns the text that is certain now and was not before.

        Args:
            check: False: matches that end in `new` do not count, though one may begin here.
        """
        match = self._matcher.feed(new, check)
        text = self._held + new
        if match is None:
            certain = len(text) - self._matcher.pending
            self._held = text[certain:]
        else:
            self.matched = match.stop
            certain = len(self._held) + match.end - (0 if self._include else len(match.stop))
            self._held = ""
        return text[:certain]

    def feed_hidden(self, _text: str, _check: bool = True) -> str:
        """Read text that is not part of the answer's: none of these stop strings has a part in it."""
        return ""

    def finish(self) -> str:
        """Return what was held back, which is certain now: no text follows."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held


class SpecialCutter:
    """Cutter as `PlainCutter`, where some stop strings hold texts that the answer's text leaves out.

    These see all text, in the order of tokens, the others what the answer shows; a cut takes from what is shown.

    Args:
        hidden: the texts left out.
    """

    def __init__(self, stops: Sequence[str], include: bool, hidden: Iterable[str]) -> None:
        self.matched: str | None = None
        texts = tuple(hidden)
        special = [stop for stop in stops if any(text in stop for text in texts)]
        self._shown = StopMatcher([stop for stop in stops if stop not in special])
        self._all = StopMatcher(special)
        self._include = include
        self._held: list[tuple[str, bool]] = []  # characters, and whether they are shown

    def feed(self, new: str, check: bool = True) -> str:
        """Do as `PlainCutter.feed` does."""
        return self._feed(new, True, check)

    def feed_hidden(self, text: str, check: bool = True) -> str:
        """Do as `feed` does, with text that the answer leaves out."""
        return self._feed(text, False, check)

    def finish(self) -> str:
        """Do as `PlainCutter.finish` does."""
        return self._release(len(self._held))

    def _feed(self, new: str, shown: bool, check: bool) -> str:
        for character in new:
            self._held.append((character, shown))
            in_shown = self._shown.feed(character, check) if shown else None
            in_all = self._all.feed(character, check)
            if in_shown is None and in_all is None:
                continue
            # Of strings complete at the same character the longest, as in `StopMatcher`.
            if in_all is None or (in_shown is not None and len(in_shown.stop) > len(in_all.stop)):
                assert in_shown is not None
                self.matched, start = in_shown.stop, self._last_shown(len(in_shown.stop))
            else:
                self.matched, start = in_all.stop, len(self._held) - len(in_all.stop)
            text = self._release(start)
            self._held = []
            return text + (self.matched if self._include else "")
        pending = max(self._all.pending, len(self._held) - self._last_shown(self._shown.pending))
        return self._release(len(self._held) - pending)

    def _last_shown(self, count: int) -> int:
        """Return the index of the first of the last `count` shown characters."""
        index = len(self._held)
        while count:
            index -= 1
            count -= self._held[index][1]
        return index

    def _release(self, end: int) -> str:
        text = "".join(character for character, shown in self._held[:end] if shown)
        del self._held[:end]
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
