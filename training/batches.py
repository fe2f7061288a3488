"""Training batches: task documents and plain text as token rows of one length, with what carries loss."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

from winnow_lab.evaluate.demo_tasks import CATEGORIES, Haystack, make_document, question_suffix

# Shares of the rows; the categories that are learned last get most. Plain text keeps the prose familiar.
MIX = {
    "single": 1.0,
    "two-hop": 1.0,
    "passkey": 0.8,
    "key-value": 1.2,
    "few-shot": 1.0,
    "code": 1.2,
    "passage": 1.6,
    "key-points": 1.6,
    "plain": 0.6,
}
CONTEXT_WEIGHT = 0.05
MOST_QUESTIONS = 16
MOST_PLANTED = 30
SHOWN_LABEL = re.compile(r"(?<=belongs to the group) (\w+)")


@dataclass(frozen=True)
class Row:
    """Tokens of one row, and for each whether it belongs to an answer (its end token included)."""

    tokens: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class Batch:
    """Arrays of one step: `tokens` and RoPE `positions` `[rows, length]`; `chosen`, `targets`, `weights` `[logits]`.

    `chosen` indexes the flattened rows; the token after it is the target.
    """

    tokens: np.ndarray
    positions: np.ndarray
    chosen: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class RowMaker:
    """Makes rows from a haystack and a tokenizer; `mix` gives the share of each category."""

    def __init__(self, tokenizer: Tokenizer, haystack: Haystack, mix: dict[str, float]) -> None:
        self.tokenizer, self.haystack, self.mix = tokenizer, haystack, mix
        self.bos, self.eos, self.pad = (special(tokenizer, token) for token in ("<s>", "</s>", "<pad>"))
        self.count: Callable[[str], int] = lru_cache(maxsize=1 << 16)(lambda text: len(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        """Tokens of a piece of text, nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def plain(self, rng: random.Random, length: int) -> Row:
        """Consecutive sentences only."""
        tokens = [self.bos, *self.encode(" ".join(self.haystack.passage(rng, length + 32)))][:length]
        return Row(tokens, [False] * len(tokens))

    def document(self, rng: random.Random, category: str, length: int) -> Row:
        """One task document: dense with facts and questions where it is short, with more haystack where it is long."""
        share = rng.uniform(0.3, 1.0) * (0.9 if length <= 256 else 0.5)
        if category == "passage":
            planted, asked = rng.choice((1, 1, 2, 2, 3)), max(1, int(share * length / 60))
        else:
            planted = max(CATEGORIES[category].fewest, int(share * length / CATEGORIES[category].cost))
            asked = planted
        if category == "key-points":
            planted = min(planted, rng.randint(2, 7))
        document = make_document(
            category,
            rng,
            self.haystack,
            self.count,
            length,
            min(planted, MOST_PLANTED),
            min(asked, MOST_QUESTIONS),
        )
        encoding = self.tokenizer.encode(document.context, add_special_tokens=False)
        tokens = [self.bos, *encoding.ids]
        spans = repeated_labels(document.context) if category == "few-shot" else []
        is_answer = [False, *(any(start <= at < end for start, end in spans) for at, _ in encoding.offsets)]
        for question in document.questions:
            asked_tokens = self.encode(question_suffix(question.text))
            answer = [*self.encode(" " + question.answer), self.eos]
            tokens += asked_tokens + answer
            is_answer += [False] * len(asked_tokens) + [True] * len(answer)
        return Row(tokens[:length], is_answer[:length])

    def row(self, rng: random.Random, length: int) -> Row:
        """A row of a random category."""
        category = rng.choices(list(self.mix), list(self.mix.values()))[0]
        return self.plain(rng, length) if category == "plain" else self.document(rng, category, length)

    def batch(self, rng: random.Random, rows: int, length: int, logits: int, max_positions: int) -> Batch:
        """`rows` rows of `length` tokens at positions below `max_positions` (see `skipped_positions`).

        All answer tokens carry loss, and random others up to `logits` in total.
        """
        made = [self.row(rng, length) for _ in range(rows)]
        tokens = np.full((rows, length), self.pad, dtype=np.int64)
        answers = np.zeros((rows, length), dtype=bool)
        filled = np.zeros((rows, length), dtype=bool)
        for number, row in enumerate(made):
            tokens[number, : len(row.tokens)] = row.tokens
            answers[number, : len(row.tokens)] = row.is_answer
            filled[number, : len(row.tokens)] = True
        positions = np.stack([skipped_positions(rng, length, max_positions) for _ in range(rows)])
        return Batch(tokens, positions, *choose(rng, tokens, answers, filled, logits))


def special(tokenizer: Tokenizer, token: str) -> int:
    """The number of a special token; raises ValueError where the tokenizer has none."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no {token}")
    return number


def repeated_labels(context: str) -> list[tuple[int, int]]:
    """Where a few-shot context shows a label again: from its group's other words, that is a question like any other."""
    shown: set[str] = set()
    spans = []
    for found in SHOWN_LABEL.finditer(context):
        if found[1] in shown:
            spans.append(found.span())
        shown.add(found[1])
    return spans


def skipped_positions(rng: random.Random, length: int, max_positions: int) -> np.ndarray:
    """RoPE positions of one row: one row in five jumps ahead at one to three places.

    A short row then holds distances of up to `max_positions`, which trains attention over long contexts at the price
    of short ones.
    """
    positions = np.arange(length)
    spare = max_positions - length
    if spare > 0 and rng.random() < 0.2:
        for _ in range(rng.randint(1, 3)):
            jump = rng.randint(0, spare)
            positions[rng.randrange(1, length) :] += jump
            spare -= jump
    return positions


def choose(
    rng: random.Random, tokens: np.ndarray, answers: np.ndarray, filled: np.ndarray, logits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions whose logits are computed, their targets and loss weights: answers first, then random others."""
    length = tokens.shape[1]
    after = np.arange(tokens.size).reshape(tokens.shape)
    usable = filled & (after % length > 0)
    generator = np.random.default_rng(rng.getrandbits(32))
    certain = after[answers & usable][:logits]
    others = after[usable & ~answers]
    others = generator.permutation(others)[: logits - len(certain)]
    spare = logits - len(certain) - len(others)
    ahead = np.concatenate([certain, others, np.ones(spare, dtype=np.int64)])
    weights = np.repeat([1.0, CONTEXT_WEIGHT, 0.0], [len(certain), len(others), spare])
    return ahead - 1, tokens.reshape(-1)[ahead], weights.astype(np.float32)
