"""Tasks that ask for something hidden in real prose: for training the demo model, and for measuring with it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from winnow_lab.evaluate.demo_tasks import words
from winnow_lab.evaluate.demo_tasks.haystack import CountTokens, Haystack, scatter

__all__ = ["CATEGORIES", "CountTokens", "Haystack", "make_document", "make_sample", "question_suffix"]

# A layout that does not fit is tried again with a line and a question fewer, or from another place of the haystack.
_TRIES = 200
# At most this many tokens ask which passage ends with eight quoted words, and answer.
_QUOTING_TOKENS = 36


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


@dataclass(frozen=True)
class DemoSample:
    """One prompt with its reference; `metric` is a key of `winnow_lab.evaluate.metrics.METRICS`."""

    category: str
    context: str
    question: str
    answer: str
    metric: str

    @property
    def prompt(self) -> str:
        """Context and question in the form the demo model was trained on; the answer follows after a space."""
        return self.context + question_suffix(self.question)


@dataclass(frozen=True)
class DemoDocument:
    category: str
    context: str
    questions: tuple[Question, ...]
    metric: str

    def sample(self, index: int = 0) -> DemoSample:
        """The context with only the question at `index`."""
        question = self.questions[index]
        return DemoSample(self.category, self.context, question.text, question.answer, self.metric)


def question_suffix(question: str) -> str:
    """What stands between a context (or an earlier answer) and the answer to `question`."""
    return f"\nQuestion: {question}\nAnswer:"


# -- lines to hide, before any layout ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planting:
    """Lines to hide, in order, and every question they answer; with `own_line` they stand alone, else in the prose."""

    lines: list[str]
    questions: list[Question]
    own_line: bool = False


def _single(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Facts about people; several share the person, several the attribute, so that a question needs both."""
    people = rng.sample(words.NAMES, max(2, count // 2 + 1))
    attributes = rng.sample(list(words.ATTRIBUTES), min(max(2, count // 2 + 1), len(words.ATTRIBUTES)))
    pairs = rng.sample([(attribute, person) for attribute in attributes for person in people], count)
    facts = [(attribute, person, rng.choice(words.ATTRIBUTES[attribute])) for attribute, person in pairs]
    return Planting(
        [f"The {attribute} of {person} is {value}." for attribute, person, value in facts],
        [Question(f"What is the {attribute} of {person}?", value) for attribute, person, value in facts],
    )


def _two_hop(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """A relation between two names and a fact about each: the answer names the bridge, then its value."""
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
        asked = f"What is the {attribute} of the {relation} of {head}?"
        questions.append(Question(asked, f"{bridge}, {value}"))
    rng.shuffle(lines)
    return Planting(lines, questions)


def _passkey(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    keys = [(person, f"{rng.randrange(1000, 10000)}") for person in rng.sample(words.NAMES, count)]
    return Planting(
        [f"The pass key of {person} is {key}." for person, key in keys],
        [Question(f"What is the pass key of {person}?", key) for person, key in keys],
    )


def _key_value(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Entries as in a JSON object, keys of two words, values of two words and a number."""
    keys = words.distinct_pairs(rng, words.ADJECTIVES, words.NOUNS, "-", count)
    values = words.distinct_pairs(rng, words.ADJECTIVES, words.NOUNS, "-", count)
    entries = [(key, f"{value}-{rng.randrange(10, 100)}") for key, value in zip(keys, values, strict=True)]
    return Planting(
        [f'"{key}": "{value}",' for key, value in entries],
        [Question(f'What is the value of "{key}"?', value) for key, value in entries],
        own_line=True,
    )


def _few_shot(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Words with made-up group labels; asked for a word not shown, of a group whose other words were shown."""
    groups = rng.sample(list(words.WORD_GROUPS), max(2, min(6, count // 3)))
    labels: dict[str, None] = {}
    while len(labels) < len(groups):
        labels[words.nonsense(rng)] = None
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
    return Planting(lines, questions)


def _functions(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Short Python functions; asked for the expression that one returns."""
    functions = []
    for name in words.distinct_pairs(rng, words.VERBS, words.NOUNS, "_", count):
        argument = rng.choice(["x", "y", "n", "k", "value", "count", "size"])
        first, second = rng.choice(["+", "-", "*", "//", "%"]), rng.choice(["+", "-", "*"])
        body = f"{argument} {first} {rng.randrange(2, 100)} {second} {rng.randrange(2, 100)}"
        functions.append((name, argument, body))
    return Planting(
        [f"def {name}({argument}):\n    return {body}" for name, argument, body in functions],
        [Question(f"What does the function {name} return?", body) for name, _, body in functions],
        own_line=True,
    )


def _key_points(rng: random.Random, haystack: Haystack, count: int) -> Planting:
    """Numbered sentences marked as key points; asked for all of them, in order."""
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        sentences[haystack.pick(rng, longest=16)] = None
    listed = [f"{number}: {sentence}" for number, sentence in enumerate(sentences, start=1)]
    question = Question("What are the key points, in order?", " ; ".join(listed))
    return Planting([f"Key point {point}" for point in listed], [question], own_line=True)


# -- texts of a given length in tokens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What a text is made of, and how long it may be: `planted` lines, `asked` questions, `tokens` altogether."""

    rng: random.Random
    haystack: Haystack
    count_tokens: CountTokens
    tokens: int
    planted: int
    asked: int

    def hide(self, planting: Planting, joint: str = " ") -> tuple[list[Question], int]:
        """Choose questions; the tokens that they and the lines, which `joint` sets apart, leave for prose."""
        questions = self.rng.sample(planting.questions, min(self.asked, len(planting.questions)))
        each = 1 if joint == "\n" else 3 * planting.own_line
        taken = sum(self.count_tokens(joint + line) + each for line in planting.lines)
        return questions, self.tokens - taken - sum(map(self._question_tokens, questions))

    def _question_tokens(self, question: Question) -> int:
        asked = self.count_tokens(question_suffix(question.text))
        return asked + self.count_tokens(" " + question.answer) + 1


Made = tuple[str, list[Question]] | None
"""A text and questions about it; None: it does not fit."""


def _in_prose(plant: Callable[[random.Random, Haystack, int], Planting]) -> Callable[[Layout], Made]:
    """Hide planted lines among consecutive sentences of the haystack."""

    def lay_out(layout: Layout) -> Made:
        planting = plant(layout.rng, layout.haystack, layout.planted)
        questions, room = layout.hide(planting)
        if room < 0:
            return None
        lines = scatter(layout.rng, planting.lines, layout.haystack.passage(layout.rng, room))
        alone = (
            set(planting.lines) if planting.own_line else set()
        )  # the others follow each other in paragraphs
        text = lines[0] if lines else ""
        for before, line in pairwise(lines):
            text += ("\n" if before in alone or line in alone else " ") + line
        return text, questions

    return lay_out


def _source_code(layout: Layout) -> Made:
    """Functions below each other, with the haystack as comments between them."""
    planting = _functions(layout.rng, layout.haystack, layout.planted)
    questions, room = layout.hide(planting, "\n")
    if room < 0:
        return None
    passage = layout.haystack.passage(layout.rng, room, extra=layout.count_tokens("\n#"))
    return "\n".join(scatter(layout.rng, planting.lines, [f"# {each}" for each in passage])), questions


def _numbered_passages(layout: Layout) -> Made:
    """The haystack cut into passages of at most `planted` sentences, each closed by its number.

    Asked for the number of the one that ends with the quoted words.
    """
    rng, room = layout.rng, layout.tokens - layout.asked * _QUOTING_TOKENS
    sentences = layout.haystack.passage(rng, room)
    passages: list[str] = []
    lines: list[str] = []
    for start in range(0, len(sentences), layout.planted):
        passage = " ".join(sentences[start : start + layout.planted])
        line = f"{passage} [{len(lines) + 1}]"
        room -= layout.count_tokens("\n" + line)
        if room < 0:
            break
        lines.append(line)
        passages.append(passage)
    context = "\n".join(lines)
    # The last four to eight words of each, without its closing mark.
    ends = [" ".join(each.split()[-rng.randint(4, 8) :]).rstrip(".,;:!?") for each in passages]
    clear = [(str(number), end) for number, end in enumerate(ends, start=1) if context.count(end) == 1]
    if len(passages) < 2 or not clear:
        return None
    chosen = rng.sample(clear, min(layout.asked, len(clear)))
    return context, [Question(f'Which passage ends with "{end}"?', number) for number, end in chosen]


@dataclass(frozen=True)
class Category:
    """One kind of task.

    `planted` is how many lines a sample hides by default, `fewest` the least that makes sense, and `cost`
    roughly the tokens of one hidden line together with a question about it.
    """

    name: str
    lay_out: Callable[[Layout], Made]
    metric: str
    planted: int
    fewest: int
    cost: int


CATEGORIES: dict[str, Category] = {
    category.name: category
    for category in (
        Category("single", _in_prose(_single), "exact", planted=8, fewest=2, cost=26),
        Category("two-hop", _in_prose(_two_hop), "exact", planted=9, fewest=3, cost=18),
        Category("passkey", _in_prose(_passkey), "exact", planted=8, fewest=1, cost=27),
        Category("key-value", _in_prose(_key_value), "exact", planted=12, fewest=1, cost=45),
        Category("few-shot", _in_prose(_few_shot), "exact", planted=15, fewest=4, cost=25),
        Category("code", _source_code, "exact", planted=8, fewest=1, cost=48),
        Category("passage", _numbered_passages, "exact", planted=2, fewest=1, cost=0),
        Category("key-points", _in_prose(_key_points), "rouge-l", planted=4, fewest=1, cost=42),
    )
}


def make_document(
    category: str,
    rng: random.Random,
    haystack: Haystack,
    count_tokens: CountTokens,
    tokens: int,
    planted: int | None = None,
    questions: int = 1,
) -> DemoDocument:
    """A context with up to `questions` questions; with these and answers it takes about `tokens` tokens, never more.

    Args:
        planted: number of hidden lines (for "passage", sentences in a passage); fewer where they do not fit.
    """
    if category not in CATEGORIES:
        raise ValueError(f"unknown category {category!r}: expected one of {', '.join(CATEGORIES)}")
    kind = CATEGORIES[category]
    count, asked = max(kind.fewest, kind.planted if planted is None else planted), questions
    for _ in range(_TRIES):
        made = kind.lay_out(Layout(rng, haystack, count_tokens, tokens - 1, count, asked))
        if made is not None:
            return DemoDocument(category, made[0], tuple(made[1]), kind.metric)
        count, asked = max(kind.fewest, count - 1), max(1, asked - 1)
    raise ValueError(f"{tokens} tokens are too few for a {category!r} sample")


def make_sample(
    category: str,
    rng: random.Random,
    haystack: Haystack,
    count_tokens: CountTokens,
    tokens: int,
    planted: int | None = None,
) -> DemoSample:
    """A prompt of about `tokens` tokens, answer included, with one question. Errors as in `make_document`."""
    return make_document(category, rng, haystack, count_tokens, tokens, planted).sample()
