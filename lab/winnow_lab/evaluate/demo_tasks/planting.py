"""Needles and questions of each category: lists of lines and questions, before any layout."""

import random
from dataclasses import dataclass

from winnow_lab.evaluate.demo_tasks import words
from winnow_lab.evaluate.demo_tasks.haystack import Haystack
from winnow_lab.evaluate.demo_tasks.sample import Question


@dataclass(frozen=True)
class Planting:
    """Lines to hide, in order, and every question they answer; with `own_line` they stand alone, else in the prose."""

    lines: tuple[str, ...]
    questions: tuple[Question, ...]
    own_line: bool = False


def single(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return facts about people; several share the person, several the attribute, so that a question needs both."""
    people = rng.sample(words.NAMES, max(2, count // 2 + 1))
    attributes = rng.sample(list(words.ATTRIBUTES), min(max(2, count // 2 + 1), len(words.ATTRIBUTES)))
    pairs = rng.sample([(attribute, person) for attribute in attributes for person in people], count)
    facts = [(attribute, person, rng.choice(words.ATTRIBUTES[attribute])) for attribute, person in pairs]
    return Planting(
        tuple(f"The {attribute} of {person} is {value}." for attribute, person, value in facts),
        tuple(Question(f"What is the {attribute} of {person}?", value) for attribute, person, value in facts),
    )


def two_hop(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return a relation between two names and a fact about each: the answer names the bridge, then its value."""
    chains = max(1, count // 3)
    people = rng.sample(words.NAMES, 2 * chains)
    lines, questions = [], []
    for head, bridge in zip(people[:chains], people[chains:], strict=True):
        relation, attribute = rng.choice(words.RELATIONS), rng.choice(list(words.ATTRIBUTES))
        value, decoy = rng.sample(words.ATTRIBUTES[attribute], 2)
        lines += [
            f"The {relation} of {head} is {bridge}.",
            f"The {attribute} of {bridge} is {value}.",
            f"The {attribute} of {head} is {decoy}.",
        ]
        questions.append(
            Question(f"What is the {attribute} of the {relation} of {head}?", f"{bridge}, {value}")
        )
    rng.shuffle(lines)
    return Planting(tuple(lines), tuple(questions))


def passkey(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return four-digit keys of several people."""
    keys = [(person, f"{rng.randrange(1000, 10000)}") for person in rng.sample(words.NAMES, count)]
    return Planting(
        tuple(f"The pass key of {person} is {key}." for person, key in keys),
        tuple(Question(f"What is the pass key of {person}?", key) for person, key in keys),
    )


def key_value(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return entries as in a JSON object, keys of two words, values of two words and a number."""
    keys = words.distinct_pairs(rng, words.ADJECTIVES, words.NOUNS, "-", count)
    values = words.distinct_pairs(rng, words.ADJECTIVES, words.NOUNS, "-", count)
    entries = [(key, f"{value}-{rng.randrange(10, 100)}") for key, value in zip(keys, values, strict=True)]
    return Planting(
        tuple(f'"{key}": "{value}",' for key, value in entries),
        tuple(Question(f'What is the value of "{key}"?', value) for key, value in entries),
        own_line=True,
    )


def few_shot(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return words with made-up group labels; asked for a word not shown, of a group whose other words were shown."""
    groups = rng.sample(list(words.WORD_GROUPS), max(2, min(6, count // 3)))
    labels: list[str] = []
    while len(labels) < len(groups):
        label = words.nonsense(rng)
        if label not in labels:
            labels.append(label)
    shown = [count // len(groups) + (number < count % len(groups)) for number in range(len(groups))]
    lines, questions = [], []
    for group, label, examples in zip(groups, labels, shown, strict=True):
        members = rng.sample(words.WORD_GROUPS[group], len(words.WORD_GROUPS[group]))
        examples = min(examples, len(members) - 3)
        lines += [f'The word "{word}" belongs to the group {label}.' for word in members[:examples]]
        questions += [
            Question(f'Which group does the word "{word}" belong to?', label)
            for word in members[examples : examples + 3]
        ]
    rng.shuffle(lines)
    return Planting(tuple(lines), tuple(questions))


def code(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return short Python functions; asked for the expression that one returns."""
    functions = []
    for name in words.distinct_pairs(rng, words.VERBS, words.NOUNS, "_", count):
        argument = rng.choice(["x", "y", "n", "k", "value", "count", "size"])
        first, second = rng.choice(["+", "-", "*", "//", "%"]), rng.choice(["+", "-", "*"])
        functions.append(
            (name, argument, f"{argument} {first} {rng.randrange(2, 100)} {second} {rng.randrange(2, 100)}")
        )
    return Planting(
        tuple(f"def {name}({argument}):\n    return {body}" for name, argument, body in functions),
        tuple(Question(f"What does the function {name} return?", body) for name, _, body in functions),
        own_line=True,
    )


def key_points(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Return numbered sentences marked as key points; asked for all of them, in order."""
    sentences: list[str] = []
    while len(sentences) < count:
        sentence = haystack.pick(rng, longest=16)
        if sentence not in sentences:
            sentences.append(sentence)
    listed = [f"{number}: {sentence}" for number, sentence in enumerate(sentences, start=1)]
    return Planting(
        tuple(f"Key point {point}" for point in listed),
        (Question("What are the key points, in order?", " ; ".join(listed)),),
        own_line=True,
    )
