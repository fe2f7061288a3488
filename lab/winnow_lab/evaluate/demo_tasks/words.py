"""The vocabulary of the planted facts: names, attributes with their values, and word groups, from data/words.json."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

_LISTS = json.loads((Path(__file__).parents[1] / "data" / "words.json").read_text(encoding="utf-8"))
NAMES: tuple[str, ...] = tuple(_LISTS["names"])
ATTRIBUTES: Mapping[str, list[str]] = _LISTS["attributes"]
RELATIONS: tuple[str, ...] = tuple(_LISTS["relations"])
WORD_GROUPS: Mapping[str, list[str]] = _LISTS["word groups"]
ADJECTIVES: tuple[str, ...] = tuple(_LISTS["adjectives"])
NOUNS: tuple[str, ...] = tuple(_LISTS["nouns"])
VERBS: tuple[str, ...] = tuple(_LISTS["verbs"])


def nonsense(rng: random.Random) -> str:
    """A made-up word of two syllables, such as "zolu"."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2))


def distinct_pairs(
    rng: random.Random, left: tuple[str, ...], right: tuple[str, ...], joint: str, count: int
) -> list[str]:
    """`count` different combinations of one word of each list, with `joint` between."""
    numbers = rng.sample(range(len(left) * len(right)), count)
    return [left[number // len(right)] + joint + right[number % len(right)] for number in numbers]
