"""Real prose as a list of sentences with their lengths in tokens, and the layout of planted lines in it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Haystack:
    sentences: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def build(cls, sentences: Sequence[str], count_tokens: CountTokens) -> "Haystack":
        """Count each sentence once; raise ValueError when there is none."""
        if not sentences:
            raise ValueError("a haystack needs at least one sentence")
        return cls(tuple(sentences), tuple(count_tokens(" " + sentence) for sentence in sentences))

    def passage(self, rng: random.Random, tokens: int, extra: int = 0) -> list[str]:
        """Consecutive sentences from a random place of at most `tokens`, counting `extra` more for each."""
        taken: list[str] = []
        position = rng.randrange(len(self.sentences))
        while self.lengths[position] + extra <= tokens:
            taken.append(self.sentences[position])
            tokens -= self.lengths[position] + extra
            position = (position + 1) % len(self.sentences)
        return taken

    def pick(self, rng: random.Random, longest: int) -> str:
        """A random sentence of at most `longest` tokens; after 200 misses the shortest one seen."""
        best = rng.randrange(len(self.sentences))
        for _ in range(200):
            if self.lengths[best] <= longest:
                break
            best = min(best, rng.randrange(len(self.sentences)), key=self.lengths.__getitem__)
        return self.sentences[best]


def scatter(rng: random.Random, planted: Sequence[str], around: Sequence[str]) -> list[str]:
    """Both lists merged at random, each in its own order."""
    return insert(planted, around, sorted(rng.randrange(len(around) + 1) for _ in planted))


def insert(planted: Sequence[str], around: Sequence[str], places: Sequence[int]) -> list[str]:
    """Both lists merged: each planted item before the item of `around` that its place names; places rise."""
    merged: list[str] = []
    start = 0
    for place, line in zip(places, planted, strict=True):
        merged += [*around[start:place], line]
        start = place
    return merged + list(around[start:])
