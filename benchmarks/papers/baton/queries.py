"""The paper's two sets of queries, with real text and lengths scaled to what a small machine can do."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.baton.paper import (
    DOUBLED_BATCH,
    LONG_WORDS,
    MIXED,
    SHORT_SET_WORDS,
    SHORT_WORDS,
    Words,
)

_MIXED_QUARTER, _SHORT_QUERIES = 30, 30
_LEAST_TOKENS = 2


@dataclass(frozen=True)
class Lengths:
    """Tokens of a query."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        return self.prompt + self.answer


@dataclass(frozen=True)
class Query:
    """A prompt, and how many tokens its answer has: the end of text does not end it, so all modes do the same work."""

    token_ids: tuple[int, ...]
    answer_tokens: int


def draw_lengths(query_set: str, batch: int, scale: float, seed: int) -> list[Lengths]:
    """Lengths of a set's queries, in the order in which they are submitted.

    mixed: 120 queries; long prompt and short answer, short and long, short and short as 1:1:2, in random order.
    short: 30 queries, both short. With batch 4 the mixed set's lengths are doubled, else the batch changes nothing.

    Args:
        scale: tokens for each of the paper's words.
    """
    rng = random.Random(f"{query_set}/{seed}")  # noqa: S311
    factor = scale * (2 if query_set == MIXED and batch == DOUBLED_BATCH else 1)
    kinds: list[tuple[Words, Words]]
    if query_set == MIXED:
        short = (SHORT_WORDS, SHORT_WORDS)
        kinds = [(LONG_WORDS, SHORT_WORDS), (SHORT_WORDS, LONG_WORDS), short, short] * _MIXED_QUARTER
        rng.shuffle(kinds)
    else:
        kinds = [(SHORT_SET_WORDS, SHORT_SET_WORDS)] * _SHORT_QUERIES

    def tokens(words: Words) -> int:
        return max(round(rng.randint(*words) * factor), _LEAST_TOKENS)

    return [Lengths(tokens(prompt), tokens(answer)) for prompt, answer in kinds]


def with_text(lengths: Sequence[Lengths], text: Sequence[int], first: int | None, seed: int) -> list[Query]:
    """Queries whose prompts are passages of `text`, each from a place of its own.

    Args:
        text: token ids; where a passage would end behind it, it goes on from the beginning.
        first: the token that begins every prompt, if the model has one.
    """
    rng = random.Random(f"text/{seed}")  # noqa: S311
    begin = () if first is None else (first,)
    queries = []
    for each in lengths:
        start, count = rng.randrange(len(text)), each.prompt - len(begin)
        passage = tuple(text[(start + number) % len(text)] for number in range(count))
        queries.append(Query((*begin, *passage), each.answer))
    return queries
