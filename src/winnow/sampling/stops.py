"""Stop strings, found character by character."""

from collections.abc import Sequence
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
    """Watches growing text for stop strings, whatever pieces it comes in.

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
        """How many of the last characters could be the beginning of a stop string."""
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


def _advance(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    """How much of `stop` the text ends with after one more character, if it ended with `matched` before."""
    while matched and stop[matched] != character:
        matched = borders[matched]
    return matched + (stop[matched] == character)


def _borders(stop: str) -> list[int]:
    """Per length of a beginning of `stop`: the longest shorter beginning that it also ends with."""
    borders = [0, 0]
    for length in range(1, len(stop)):
        borders.append(_advance(stop, borders, borders[length], stop[length]))
    return borders
