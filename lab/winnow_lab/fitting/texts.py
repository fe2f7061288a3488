"""Training texts: the user's, or shipped ones with inserted facts."""

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import winnow
from winnow.errors import DatasetError
from winnow_lab.evaluate.demo_tasks.haystack import insert
from winnow_lab.evaluate.demo_tasks.words import NAMES
from winnow_lab.evaluate.tasks.files import read_json_lines, read_text, shipped_sentences
from winnow_lab.evaluate.wikitext import wikitext

_THINGS = (
    *("access code", "account", "badge number", "booking", "invoice", "licence", "locker", "order", "parcel"),
    *(
        "phone number",
        "postal code",
        "reference",
        "room",
        "serial number",
        "shelf",
        "ticket",
        "token",
        "visa",
    ),
)
_TOWNS = (
    "Aarhus",
    "Bergen",
    "Cork",
    "Dresden",
    "Evora",
    "Faro",
    "Ghent",
    "Hanoi",
    "Izmir",
    "Jena",
    "Kyoto",
    "Lund",
)
# Uninformative lines, repeated as in some evaluations, in other words.
_FILLERS = (
    "The lamp is lit. The door is shut. The clock goes on. Nothing happens, and then nothing again.",
    "Rain falls on the roof. The road is wet. The birds are quiet. We wait. It will pass.",
    "One step and another step. The hill is high. The wind is cold. On we walk. Back we come.",
)
# Upper bound on characters per token for most text.
_CHARACTERS = 8


def shipped_texts(count: int, tokens: int, seed: int) -> list[str]:
    """Return texts of at least `tokens` tokens each: prose, filler, articles, lists, code and keys with several values.

    High scores of KVzip belong to unpredictable tokens, which are rare in plain prose, so names, numbers and keys are
    hidden in it.
    """
    rng = random.Random(seed)  # texts, no secrets
    kinds: tuple[Callable[[random.Random, int], str], ...] = (
        *(_prose, _filler, _articles),
        *(_records, _code, _several),
    )
    return [kinds[index % len(kinds)](rng, tokens * _CHARACTERS) for index in range(count)]


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Read texts: of a .jsonl file the field `text` or `prompt` of each object; any other file is one text.

    Raises:
        DatasetError: a file cannot be read, or an object has no such field; the message names the line.
    """
    return [text for path in paths for text in _texts_of(path) if text.strip()]


def cut(tokenizer: Any, texts: Sequence[str], tokens: int, most: int) -> list[str]:
    """Cut at most `most` pieces of at most `tokens` tokens, in turns from the front of each text.

    Pieces shorter than a quarter of that are dropped unless a text has no longer ones.
    """
    pieces: list[list[str]] = []
    for text in texts:
        # Tokenize no more than the pieces can need.
        ids = tokenizer.encode(text[: tokens * most * _CHARACTERS], add_special_tokens=False)
        parts = [ids[start : start + tokens] for start in range(0, len(ids), tokens)]
        long = [part for part in parts if 4 * len(part) >= tokens] or parts[:1]
        pieces.append([tokenizer.decode(part) for part in long[:most]])
    rounds = range(max(map(len, pieces), default=0))
    return [own[turn] for turn in rounds for own in pieces if turn < len(own)][:most]


def _texts_of(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield read_text(path)
        return
    for record in read_json_lines(path):
        yield record.text("prompt" if "prompt" in record.fields and "text" not in record.fields else "text")


def _prose(rng: random.Random, characters: int) -> str:
    sentences = shipped_sentences()
    return " ".join(_hidden(rng, _opening(rng, sentences, characters)))


def _articles(rng: random.Random, characters: int) -> str:
    text = wikitext()
    lines = [line.strip() for line in text.split("\n") if len(line) > 200]
    return "\n".join(_hidden(rng, _opening(rng, lines, characters)))


def _filler(rng: random.Random, characters: int) -> str:
    line = rng.choice(_FILLERS)
    return "\n".join(_hidden(rng, [line] * (characters // len(line) + 1)))


def _records(rng: random.Random, characters: int) -> str:
    style = rng.randrange(3)
    lines: list[str] = []
    while sum(map(len, lines)) < characters:
        if style == 0:
            lines.append(f'"{_value(rng)}": "{_value(rng)}",')
        elif style == 1:
            lines.append(f"{rng.choice(NAMES)}, {rng.choice(_TOWNS)}, {rng.choice(_THINGS)} {_value(rng)}")
        else:
            lines.append(_fact(rng))
    return "\n".join(lines)


def _code(rng: random.Random, characters: int) -> str:
    paths = sorted(Path(winnow.__file__).parent.rglob("*.py"))
    lines = [line for path in rng.sample(paths, min(len(paths), 40)) for line in read_text(path).split("\n")]
    return "\n".join(_hidden(rng, _opening(rng, lines, characters)))


def _several(rng: random.Random, characters: int) -> str:
    sentences = shipped_sentences()
    owners = [(rng.choice(NAMES), rng.choice(_THINGS)) for _ in range(4)]
    forms = (
        "{name} has another {thing}: {value}.",
        "A further {thing} of {name} reads {value}.",
        "Among those of {name}, the {thing} {value} counts too.",
    )
    units = _opening(rng, sentences, characters)
    count = sum(map(len, units)) // rng.choice((400, 1200))
    places = sorted(rng.randrange(len(units) + 1) for _ in range(count))
    facts = []
    for _ in places:
        name, thing = rng.choice(owners)
        facts.append(rng.choice(forms).format(name=name, thing=thing, value=_value(rng)))
    return " ".join(insert(facts, units, places))


def _opening(rng: random.Random, units: Sequence[str], characters: int) -> list[str]:
    taken: list[str] = []
    place, length = rng.randrange(len(units)), 0
    while length < characters:
        taken.append(units[place % len(units)])
        length += len(taken[-1]) + 1
        place += 1
    return taken


def _hidden(rng: random.Random, units: list[str]) -> list[str]:
    share = rng.choice((20, 60, 200))
    count = max(1, sum(map(len, units)) // (share * 20))
    places = sorted(rng.randrange(len(units) + 1) for _ in range(count))
    return insert([_fact(rng) for _ in places], units, places)


def _fact(rng: random.Random) -> str:
    name, town, thing = rng.choice(NAMES), rng.choice(_TOWNS), rng.choice(_THINGS)
    forms = (
        f"The {thing} of {name} in {town} is {_value(rng)}.",
        f"{name} wrote down {_value(rng)} for the {thing} at {town}.",
        f"Remember that the {thing} called {town.lower()}-{name.lower()} has the value {_value(rng)}.",
        f"{name} moved to {town} on {rng.randrange(1, 29)}.{rng.randrange(1, 13)}.{rng.randrange(1900, 2030)}.",
        f"Note: {thing} {_value(rng)} belongs to {name} {rng.choice(NAMES)}.",
    )
    return rng.choice(forms)


def _value(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    if kind == 1:
        return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.randrange(5, 10)))
    if kind == 2:
        return f"{rng.choice(NAMES).lower()}-{rng.choice(_TOWNS).lower()}-{rng.randrange(100)}"
    return str(rng.randrange(10 ** rng.randrange(3, 9), 10**9))


def require_texts(texts: Sequence[str], paths: Sequence[Path], least: int) -> None:
    """Raise DatasetError if there are too few texts to train on some and evaluate on others."""
    if len(texts) < least:
        named = ", ".join(map(str, paths)) or "the texts that ship"
        raise DatasetError(
            f"{named}: there must be at least {least} pieces of text, to learn from and to judge by, got {len(texts)}: "
            "give more text, or fewer --tokens"
        )
