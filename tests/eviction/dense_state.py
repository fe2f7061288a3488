"""What the dense oracle holds of a sequence: rows of KVs, the attention they were paid, and what may be evicted."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dense_model import RELATIVE, Array, Llama, floor_share

from winnow.attention import Smoothing
from winnow.eviction import EvictionPolicy, Fixed

Order = tuple[int, ...]
Stored = Callable[["Row", int, Array, Array], tuple[Array, Array]]


@dataclass
class Kv:
    token: int
    """Index of its token in the sequence."""
    position: int


class Row:
    """One layer and KV head.

    Attributes:
        held: the KVs that it holds, oldest first.
        key, rotated, value: [room, d], by token, also of KVs that are gone.
        fresh: [room, d], the rotated key as it was computed.
        query, rotated_query: [room, g, d], by token.
        paid: [g, room, room], what query head h of token i paid to the KV of token j.
        saw: [room, room], whether the KV of token j was there when token i attended.
        out: [g, room, d], what the query heads of token i got.
        at_question_end: tokens whose KVs were held when the last token of the context was computed.
    """

    def __init__(self, layer: int, head: int, room: int, group: int, head_dim: int) -> None:
        self.layer, self.head = layer, head
        self.held: list[Kv] = []
        self.key, self.rotated, self.value, self.fresh = (np.zeros((room, head_dim)) for _ in range(4))
        self.query, self.rotated_query = (np.zeros((room, group, head_dim)) for _ in range(2))
        self.paid = np.zeros((group, room, room))
        self.saw = np.zeros((room, room), dtype=bool)
        self.out = np.zeros((group, room, head_dim))
        self.at_question_end: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return [kv.token for kv in self.held]

    def attend(self, token: int, queries: Array) -> Array:
        """Rotated queries, [g, d], of a token whose own KV is held already: what they get."""
        tokens = np.array(self.tokens)
        logits = queries @ self.rotated[tokens].T / math.sqrt(queries.shape[1])
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        self.paid[:, token, tokens] = p
        self.saw[token, tokens] = True
        self.out[:, token] = p @ self.value[tokens]
        return self.out[:, token]


@dataclass(frozen=True)
class Score:
    value: float
    error: float = 0.0
    """How far float32 may be off."""
    ties: bool = True
    """Whether what is equal here is equal in float32 too, because it comes from the same numbers."""


def relative(value: float, times: int = 1) -> Score:
    """Float32 knows it only up to `RELATIVE`, a few `times` over."""
    return Score(value, times * RELATIVE * abs(value))


def pool_scores(scores: list[Score], place: int, pool: Smoothing) -> Score:
    """Of the KVs around a place: the most, or the sum over the pool's size. Equals here may differ in float32."""
    around = scores[max(place - pool.size // 2, 0) : place + pool.size // 2 + 1]
    if pool.kind == "max":
        return max(around, key=lambda score: score.value)
    value, error = (
        sum(column) / pool.size for column in zip(*((w.value, w.error) for w in around), strict=True)
    )
    return Score(value, error, ties=False)


def standardized(scores: dict[tuple[int, int], Score]) -> dict[tuple[int, int], Score]:
    """Less their mean, divided by their standard deviation."""
    values = [score.value for score in scores.values()]
    mean, count = sum(values) / max(len(values), 1), max(len(values), 2)
    deviation = max(math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1)), 1e-6)
    off = max((score.error for score in scores.values()), default=0.0) / deviation
    return {
        name: Score((score.value - mean) / deviation, score.error / deviation + off / 4, ties=False)
        for name, score in scores.items()
    }


class DenseState:
    """A prompt and its answer under a policy.

    Args:
        budget: C of the docs, KVs per row on average (of the request, or what the policy fixes).
        template_tail: tokens at the context's end that follow the question.
        asks: tokens that ask for the first chunk of a replay, and for each later one.
        room: most tokens that will be computed.

    Attributes:
        logprobs: for each computed token, of the token after it, [V].
        stored: what a codec keeps of a KV of a row, by position, key and value; None: all of it.
        unsure_from: tokens computed when a choice was first too close for float32; None: never.
    """

    def __init__(
        self,
        model: Llama,
        policy: EvictionPolicy,
        budget: int,
        prompt_len: int,
        room: int,
        *,
        block_size: int,
        context_len: int | None = None,
        spans: Iterable[tuple[int, int]] = (),
        template_tail: int = 0,
        asks: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        self._asks = asks
        self.stored: Stored | None = None
        self.policy = policy
        self.prompt_len = prompt_len
        self.context_len = prompt_len if context_len is None else context_len
        self.question_end = self.context_len - template_tail
        self.computed = 0
        self.last_round = 0
        self._last_inner_round = 0  # within the context; windows do not reach back over it
        self._round_before_question_end = 0
        self.num_rounds = 0
        self.logprobs: list[Array] = []
        self.unsure_from: int | None = None
        self._replay_scores: tuple[int, dict[tuple[int, int], dict[int, Score]]] = -1, {}
        self.token_ids: list[int] = []
        self._model = model
        self._block_size = block_size
        self._spans = list(spans)
        when = policy.when
        if isinstance(policy.budget, Fixed):
            budget = policy.budget.kvs
        self._target = budget - (when.prefill_every or 0) if when.within else budget
        self._inner_target = self._target
        if when.prefill_compression is not None:
            self._inner_target = max(self._target, math.ceil(self.context_len / when.prefill_compression))
        self.limit = budget if when.within else self._inner_target + (when.prefill_every or 0)
        recent = policy.keep.recent
        self.recent = (
            floor_share(recent, max(self.target - policy.keep.sinks, 0))
            if isinstance(recent, float)
            else recent
        )
        self.rows = [
            [Row(layer, head, room, model.group, model.head_dim) for head in range(model.num_heads)]
            for layer in range(model.num_layers)
        ]

    @property
    def target(self) -> int:
        """KVs per row that a round now leaves."""
        return self._inner_target if self.computed < self.context_len else self._target

    @property
    def all_rows(self) -> list[Row]:
        return [row for layer in self.rows for row in layer]

    def _protected(self, kv: Kv) -> bool:
        # The latest of all tokens, or within the template's tail of those before it.
        end = self.question_end if self.question_end < self.computed <= self.context_len else self.computed
        return (
            kv.position < self.policy.keep.sinks
            or end - 1 - kv.position < self.recent
            or self.question_end <= kv.token < self.context_len
            or any(start <= kv.position < end for start, end in self._spans)
        )

    def _num_protected(self, row: Row) -> int:
        return sum(self._protected(kv) for kv in row.held)

    def _free(self, row: Row, scores: dict[int, Score]) -> list[tuple[Score, Order, int]]:
        """Score, age and token of the KVs that may be evicted; ties go to the older one."""
        return [(scores[kv.token], (kv.token,), kv.token) for kv in row.held if not self._protected(kv)]

    def _lowest(self, candidates: Sequence[tuple[Score, Order, Any]], count: int) -> list[Any]:
        """The names of the `count` lowest scores; ties are taken in order."""
        ordered = sorted(candidates, key=lambda c: (c[0].value, c[1]))
        taken, left = ordered[: max(count, 0)], ordered[max(count, 0) :]
        most = max((a.value + a.error for a, *_ in taken), default=-math.inf)
        least = min((b.value - b.error for b, *_ in left), default=math.inf)
        near_taken = [a for a, *_ in taken if a.value + a.error >= least]
        for b, *_ in left:
            for a in near_taken if most >= b.value - b.error else ():
                tie = a.value == b.value and a.ties and b.ties
                if not tie and a.value + a.error >= b.value - b.error:
                    self._doubt()
        return [name for _, _, name in taken]

    def _doubt(self) -> None:
        if self.unsure_from is None:
            self.unsure_from = self.computed
