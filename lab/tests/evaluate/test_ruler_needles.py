"""The recipes that hide needles: how many, of what kind, where, and what is asked."""

import random
import re

import pytest
from plain_settings import plain_settings

from winnow.errors import EvaluationError
from winnow_lab.evaluate.sample import Sample
from winnow_lab.evaluate.tasks.ruler import RULER
from winnow_lab.evaluate.tasks.ruler.needles import DEPTHS, NOISE, drawn_keys, hide_in_sentences, opening

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
WORDS, NUMBER = r"[a-z]+-[a-z]+", r"[1-9]\d{6}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def made(category: str, **options: object) -> list[Sample]:
    return RULER.samples(plain_settings(categories=(category,), **{"samples": 4, **options}))


@pytest.mark.parametrize(
    ("category", "keys", "values", "key", "value"),
    [
        ("niah_single_1", 1, 1, WORDS, NUMBER),
        ("niah_single_2", 1, 1, WORDS, NUMBER),
        ("niah_single_3", 1, 1, WORDS, UUID),
        ("niah_multikey_1", 4, 1, WORDS, NUMBER),
        ("niah_multivalue", 1, 4, WORDS, NUMBER),
        ("niah_multiquery", 4, 1, WORDS, NUMBER),
    ],
)
def test_as_many_needles_of_the_right_kind(
    category: str, keys: int, values: int, key: str, value: str
) -> None:
    for sample in made(category):
        found = NEEDLE.findall(sample.context)
        assert len(found) == len(set(found)) == keys * values
        assert len({name for _, name, _ in found}) == keys
        assert all(re.fullmatch(key, name) and re.fullmatch(value, said) for _, name, said in found)


@pytest.mark.parametrize(
    ("category", "key", "value"), [("niah_multikey_2", WORDS, NUMBER), ("niah_multikey_3", UUID, UUID)]
)
def test_among_needles_every_line_is_one(category: str, key: str, value: str) -> None:
    for sample in made(category):
        lines = sample.context.split("\n")[1:]
        found = [NEEDLE.fullmatch(line) for line in lines]
        assert all(found) and len(lines) > 10
        assert len({match[2] for match in found if match}) == len(lines)
        assert all(re.fullmatch(key, m[2]) and re.fullmatch(value, m[3]) for m in found if m)


def test_what_is_asked_is_what_was_hidden() -> None:
    for category in ("niah_single_1", "niah_multikey_1", "niah_multikey_2", "niah_multivalue"):
        for sample in made(category, questions=3):
            hidden: dict[str, set[str]] = {}
            for _, key, value in NEEDLE.findall(sample.context):
                hidden.setdefault(key, set()).add(value)
            for question in sample.questions:
                (key,) = {key for key in hidden if f" {key} " in question.text}
                assert set(question.references) == hidden[key]


def test_templates() -> None:
    (one,) = made("niah_single_3", samples=1)
    key = NEEDLE.findall(one.context)[0][1]
    assert one.context.startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    )
    assert one.questions[0].plain == (
        f"\nWhat is the special magic uuid for {key} mentioned in the provided text?"
        f" The special magic uuid for {key} mentioned in the provided text is"
    )
    (many,) = made("niah_multiquery", samples=1)
    assert many.context.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    asked = re.fullmatch(
        r"\nWhat are all the special magic numbers for (\S+), (\S+), (\S+), and (\S+) mentioned in the provided text\?"
        r" The special magic numbers for \1, \2, \3, and \4 mentioned in the provided text are",
        many.questions[0].plain,
    )
    assert asked
    values = {key: value for _, key, value in NEEDLE.findall(many.context)}
    assert many.questions[0].references == tuple(values[key] for key in asked.groups())


def test_needles_in_noise_stand_anywhere() -> None:
    places = []
    for sample in made("niah_single_1", samples=200, tokens=(1024,)):
        lines = sample.context.split("\n")[1:]
        (place,) = [place for place, line in enumerate(lines) if line != NOISE]
        places.append(place / (len(lines) - 1))
    assert min(places) == 0.0 and max(places) == 1.0
    assert 0.4 < sum(places) / len(places) < 0.6


def test_depths_in_prose() -> None:
    assert DEPTHS[0] == 0 and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40
    sentences = [f"s{number}" for number in range(1000)]
    for seed in range(50):
        merged = hide_in_sentences(random.Random(seed), ["n0", "n1", "n2", "n3"], sentences)
        assert [item for item in merged if item[0] == "s"] == sentences
        assert [item for item in merged if item[0] == "n"] == ["n0", "n1", "n2", "n3"]
        depths = [(merged.index(f"n{number}") - number) // 10 for number in range(4)]
        assert set(depths) <= set(DEPTHS) and len(set(depths)) == 4


def test_prose_of_any_number_of_words() -> None:
    sentences = ("One two three.", "Four five.", "Six.")
    assert opening(sentences, 1, 0) == []
    assert opening(sentences, 1, 2) == ["Four five."]
    assert opening(sentences, 1, 5) == ["Four five.", "Six.", "One two"]
    for words in range(30):
        assert len(" ".join(opening(sentences, 2, words)).split()) == words


def test_samples_read_different_parts_of_the_book() -> None:
    assert len({sample.context[150:250] for sample in made("niah_single_2", samples=5)}) == 5


def test_pairs_of_words_come_to_an_end() -> None:
    keys = []
    with pytest.raises(EvaluationError, match="more keys than the"):
        for key in drawn_keys(random.Random(0), "words"):
            keys.append(key)
    assert len(set(keys)) == len(keys) > 10_000
