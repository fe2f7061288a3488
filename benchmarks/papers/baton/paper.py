"""What the BATON paper tells of its queries (5.1) and of the times that they took (Tables 1 and 2)."""

from collections.abc import Mapping
from types import MappingProxyType

MIXED, SHORT = "mixed", "short"
SETS = (MIXED, SHORT)

Words = tuple[int, int]
"""Fewest and most words of a text; lengths between are drawn evenly."""

LONG_WORDS: Words = (3600, 4400)
"""\"around 4,000\", in the mixed set."""
SHORT_WORDS: Words = (24, 400)
"""\"a few dozen to 400\", in the mixed set."""
SHORT_SET_WORDS: Words = (24, 200)
"""\"a few dozen to 200\", prompts and answers of the short set."""
DOUBLED_BATCH = 4
"""With this batch size every length of the mixed set is doubled (5.2.1)."""

_SECONDS: Mapping[str, Mapping[str, Mapping[int, float]]] = MappingProxyType(
    {
        MIXED: {
            "static": {4: 21901, 8: 6619},
            "pd": {4: 21781, 8: 6577},
            "shaping-gaps": {4: 20549, 8: 3424},
            "embedding": {4: 11771, 8: 2654},
        },
        # Its method is named as the one without P&D in Table 1; the text does not tell which of the two it is.
        SHORT: {
            "static": {2: 161.77, 4: 92.68, 6: 61.70, 8: 50.07, 10: 40.45},
            "shaping-gaps": {2: 83.43, 4: 49.61, 6: 37.25, 8: 31.08, 10: 30.99},
            "embedding": {2: 83.43, 4: 49.61, 6: 37.25, 8: 31.08, 10: 30.99},
        },
    }
)


def published_batches(query_set: str) -> tuple[int, ...]:
    """The batch sizes that the paper measured."""
    return tuple(_SECONDS[query_set]["static"])


def published_gain(query_set: str, mode: str, batch: int, over: str = "static") -> float | None:
    """How many times faster than `over` a mode was in the paper; None where it was not measured."""
    ours = _SECONDS[query_set].get(mode, {}).get(batch)
    theirs = _SECONDS[query_set].get(over, {}).get(batch)
    return None if ours is None or theirs is None else theirs / ours
