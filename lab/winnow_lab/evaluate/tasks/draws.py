"""Random draws that tasks share."""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from winnow.errors import EvaluationError

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


def shuffled(rng: random.Random, count: int) -> Iterator[int]:
    """Yield the numbers below `count` in random order: the first are the same however many are taken."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        place = rng.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.get(last, last)


def distinct(draw: Callable[[], H]) -> Iterator[H]:
    """Yield what `draw` gives, each value once; never ends, so that `draw` must not run dry."""
    seen: set[H] = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value


def chosen(rng: random.Random, items: Sequence[T], samples: int | None) -> list[T]:
    """Draw items at random and return them in their order; all of them for None, or where there are fewer."""
    if samples is None or samples >= len(items):
        return list(items)
    return [items[place] for place in sorted(rng.sample(range(len(items)), samples))]


def worked_examples(rng: random.Random, examples: Sequence[T], shots: int) -> list[T]:
    """Draw different examples; raises EvaluationError where there are fewer."""
    if shots > len(examples):
        raise EvaluationError(
            f"--shots must be at most {len(examples)}, the examples that there are, got {shots}"
        )
    return chosen(rng, examples, shots)
