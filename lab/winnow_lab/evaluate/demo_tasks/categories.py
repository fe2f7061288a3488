"""The categories of demo tasks, and how each becomes a text of a given length in tokens."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from winnow_lab.evaluate.demo_tasks import planting
from winnow_lab.evaluate.demo_tasks.haystack import CountTokens, Haystack, scatter
from winnow_lab.evaluate.demo_tasks.planting import Planting
from winnow_lab.evaluate.demo_tasks.sample import DemoDocument, DemoSample, Question, question_suffix

# A layout that does not fit is tried again with a line and a question fewer, or from another place of the haystack.
TRIES = 200
# At most this many tokens ask which passage ends with eight quoted words, and answer.
QUOTING_TOKENS = 36
Layout = Callable[[random.Random, Haystack, CountTokens, int, int, int], tuple[str, list[Question]] | None]


@dataclass(frozen=True)
class Category:
    """One kind of task.

    `planted` is how many lines a sample hides by default, `fewest` the least that makes sense, and `cost`
    roughly the tokens of one hidden line together with a question about it.
    """

    name: str
    layout: Layout
    metric: str
    planted: int
    fewest: int
    cost: int


def question_tokens(question: Question, count_tokens: CountTokens) -> int:
    """Return tokens of a question with its answer and the end token."""
    return count_tokens(question_suffix(question.text)) + count_tokens(" " + question.answer) + 1


def prose(plant: Callable[[random.Random, Haystack, int], Planting]) -> Layout:
    """Return a layout that hides planted lines among consecutive sentences of the haystack."""

    def lay_out(
        rng: random.Random,
        haystack: Haystack,
        count_tokens: CountTokens,
        tokens: int,
        planted: int,
        asked: int,
    ) -> tuple[str, list[Question]] | None:
        hidden = plant(rng, haystack, planted)
        questions = rng.sample(hidden.questions, min(asked, len(hidden.questions)))
        room = tokens - sum(count_tokens(" " + line) + 3 * hidden.own_line for line in hidden.lines)
        room -= sum(question_tokens(question, count_tokens) for question in questions)
        if room < 0:
            return None
        lines = scatter(rng, hidden.lines, haystack.passage(rng, room))
        return _join(lines, hidden.lines if hidden.own_line else ()), questions

    return lay_out


def source_code(
    rng: random.Random, haystack: Haystack, count_tokens: CountTokens, tokens: int, planted: int, asked: int
) -> tuple[str, list[Question]] | None:
    """Return functions below each other, with the haystack as comments between them."""
    hidden = planting.code(rng, haystack, planted)
    questions = rng.sample(hidden.questions, min(asked, len(hidden.questions)))
    room = tokens - sum(count_tokens("\n" + line) + 1 for line in hidden.lines)
    room -= sum(question_tokens(question, count_tokens) for question in questions)
    if room < 0:
        return None
    comments = [f"# {sentence}" for sentence in haystack.passage(rng, room, extra=count_tokens("\n#"))]
    return "\n".join(scatter(rng, hidden.lines, comments)), questions


def numbered_passages(
    rng: random.Random, haystack: Haystack, count_tokens: CountTokens, tokens: int, planted: int, asked: int
) -> tuple[str, list[Question]] | None:
    """Return the haystack cut into passages of at most `planted` sentences, each closed by its number.

    Asked for the number of the one that ends with the quoted words.
    """
    room = tokens - asked * QUOTING_TOKENS
    sentences = haystack.passage(rng, room)
    lines: list[str] = []
    for start in range(0, len(sentences), planted):
        line = f"{' '.join(sentences[start : start + planted])} [{len(lines) + 1}]"
        room -= count_tokens("\n" + line)
        if room < 0:
            break
        lines.append(line)
    context = "\n".join(lines)
    passages = [line.rpartition(" [")[0] for line in lines]
    endings = [(str(number), last_words(rng, passage)) for number, passage in enumerate(passages, start=1)]
    clear = [(number, ending) for number, ending in endings if context.count(ending) == 1]
    if len(passages) < 2 or not clear:
        return None
    chosen = rng.sample(clear, min(asked, len(clear)))
    questions = [Question(f'Which passage ends with "{ending}"?', number) for number, ending in chosen]
    return context, questions


def last_words(rng: random.Random, passage: str) -> str:
    """Return the last four to eight words of a passage, without its closing mark."""
    return " ".join(passage.split()[-rng.randint(4, 8) :]).rstrip(".,;:!?")


def _join(lines: list[str], own_line: tuple[str, ...]) -> str:
    """Return one text: lines of `own_line` stand alone, all others follow each other in paragraphs."""
    alone = set(own_line)
    text = lines[0] if lines else ""
    for before, line in pairwise(lines):
        text += ("\n" if before in alone or line in alone else " ") + line
    return text


CATEGORIES: dict[str, Category] = {
    category.name: category
    for category in (
        Category("single", prose(planting.single), "exact", planted=8, fewest=2, cost=26),
        Category("two-hop", prose(planting.two_hop), "exact", planted=9, fewest=3, cost=18),
        Category("passkey", prose(planting.passkey), "exact", planted=8, fewest=1, cost=27),
        Category("key-value", prose(planting.key_value), "exact", planted=12, fewest=1, cost=45),
        Category("few-shot", prose(planting.few_shot), "exact", planted=15, fewest=4, cost=25),
        Category("code", source_code, "exact", planted=8, fewest=1, cost=48),
        Category("passage", numbered_passages, "exact", planted=2, fewest=1, cost=0),
        Category("key-points", prose(planting.key_points), "rouge-l", planted=4, fewest=1, cost=42),
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
    """Return a context with up to `questions` questions.

    Context, questions and answers take about `tokens` tokens, never more than `tokens` by the count of its parts.

    `planted` is the number of hidden lines (for "passage", sentences in a passage); fewer are hidden where they do not
    fit. Raises ValueError for an unknown category, and when not even the fewest lines fit in `tokens`.
    """
    if category not in CATEGORIES:
        raise ValueError(f"unknown category {category!r}: expected one of {', '.join(CATEGORIES)}")
    kind = CATEGORIES[category]
    count, asked = max(kind.fewest, kind.planted if planted is None else planted), questions
    for _ in range(TRIES):
        laid_out = kind.layout(rng, haystack, count_tokens, tokens - 1, count, asked)
        if laid_out is not None:
            context, chosen = laid_out
            return DemoDocument(category, context, tuple(chosen), kind.metric)
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
    """Return a prompt of about `tokens` tokens, answer included, with one question. Errors as in `make_document`."""
    return make_document(category, rng, haystack, count_tokens, tokens, planted).sample()
