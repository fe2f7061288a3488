"""Keys, values, and the sentence that joins them."""

import random
import uuid
from collections.abc import Iterator
from typing import Literal

from winnow.errors import EvaluationError
from winnow_lab.evaluate.demo_tasks.words import ADJECTIVES, NOUNS
from winnow_lab.evaluate.tasks.draws import shuffled

Kind = Literal["words", "numbers", "uuids"]


def needle(noun: str, key: str, value: str) -> str:
    """Return the sentence that gives a key one of its values; `noun` says in the plural what the value is."""
    return f"One of the special magic {noun} for {key} is: {value}."


def drawn_keys(rng: random.Random, kind: Kind) -> Iterator[str]:
    """Yield different keys: pairs of an adjective and a noun, joined by a hyphen, or UUIDs.

    Raises:
        EvaluationError: more words are asked for than there are pairs.
    """
    if kind == "uuids":
        while True:
            yield drawn_value(rng, "uuids")
    # A generator of its own: values that are drawn between the keys do not change them.
    for number in shuffled(random.Random(rng.getrandbits(64)), len(ADJECTIVES) * len(NOUNS)):
        adjective, noun = divmod(number, len(NOUNS))
        yield f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
    raise EvaluationError(
        f"the haystack needs more keys than the {len(ADJECTIVES) * len(NOUNS):,} pairs of words that there are: "
        "ask for fewer tokens"
    )


def drawn_value(rng: random.Random, kind: Kind) -> str:
    """Return a number of 7 digits or a UUID of version 4."""
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    assert kind == "numbers", "words are keys alone"
    return str(rng.randrange(10**6, 10**7))
