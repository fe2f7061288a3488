"""A text that is scored as a whole, cut into stretches after a context each."""

from collections.abc import Sequence

from winnow.evaluate.likelihood import Pair


def rolling_pairs(tokens: Sequence[int], prefix: int, context: int) -> list[Pair]:
    """Every token once, in order: stretches of `context` tokens, each after the `context` tokens before it.

    The first stretch follows `prefix` alone, so of a text that is no longer nothing is evicted but by rounds while
    decoding.
    """
    pairs = []
    for start in range(0, len(tokens), context):
        before = tokens[start - context : start] if start else [prefix]
        pairs.append(Pair(tuple(before), tuple(tokens[start : start + context])))
    return pairs
