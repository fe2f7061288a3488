"""Haystacks in which needles are hidden, and their places."""

import random
from collections.abc import Sequence

from winnow_lab.evaluate.demo_tasks.haystack import insert

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# Even depths in percent, of which needles in prose get different ones.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


def noise(lines: int) -> list[str]:
    """Return the line that says nothing, over and over."""
    return [NOISE] * lines


def opening(sentences: Sequence[str], start: int, words: int) -> list[str]:
    """Return sentences from the one at `start` on, of the wanted number of words, the last one cut.

    After the end of the text they continue with its beginning, as often as it takes.
    """
    taken: list[str] = []
    place = start
    while words > 0:
        own = sentences[place % len(sentences)].split(" ")
        taken.append(" ".join(own[:words]))
        words -= len(own)
        place += 1
    return taken


def hide_in_sentences(rng: random.Random, needles: Sequence[str], sentences: Sequence[str]) -> list[str]:
    """Return prose with needles between its sentences, in their order, at different depths of `DEPTHS`."""
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    return insert(needles, sentences, [len(sentences) * depth // 100 for depth in depths])
