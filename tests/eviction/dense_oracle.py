"""What docs/eviction.md says, done slowly: one sequence, one token at a time, every attention weight remembered.

No cache, no blocks, no accumulators. A row is a list of KVs. Whenever a round falls, what a KV is worth is computed
anew from all the attention that it was ever paid. Float64; a choice that float32 could make otherwise is noted.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from random_predictor import random_predictor

from winnow.attention import Group, Smoothing
from winnow.eviction import (
    PUNCTUATION,
    SPECIAL,
    AdaptiveHeads,
    AdaptiveRows,
    Average,
    BelowAverage,
    ByOutputNorm,
    ByValueNorm,
    ChunkAttention,
    Compactor,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    ExpectedAttention,
    Fitted,
    Fixed,
    KeyDifference,
    KeyNorm,
    LastQuery,
    LayerGroups,
    LazyLayers,
    Leverage,
    MeanDeviation,
    Pyramid,
    Random,
    Recency,
    Recipes,
    Reconstruction,
    Score,
    ValueAware,
    Window,
)

Array = NDArray[np.float64]
Order = tuple[int, ...]

_OF_KEYS = 2e-6
"""How far float32 may carry a key or a value, as a share of it."""
RELATIVE = 2e-5
"""How far float32 may carry an attention weight, as a share of it, through all layers of a tiny model."""
ROUNDING = 2e-7
"""Of one float32 operation, with room for a few in a row."""
_UNSCALED = 8
"""Times `RELATIVE`, of a softmax of logits that are not divided by the root of head_dim."""


# -- the model -----------------------------------------------------------------------------------------------------


class Llama:
    """The weights of transformers' Llama, and its parts for one token, in float64."""

    def __init__(self, model: torch.nn.Module) -> None:
        config: Any = model.config
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_key_value_heads
        self.group: int = config.num_attention_heads // config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self._eps: float = config.rms_norm_eps
        self._theta: float = config.rope_parameters["rope_theta"]
        self._weights = {name: w.double().numpy() for name, w in model.state_dict().items()}

    def embed(self, token_id: int) -> Array:
        return self._weights["model.embed_tokens.weight"][token_id]

    def project(self, layer: int, hidden: Array) -> tuple[Array, Array, Array]:
        """Queries [H, g, d], keys [H, d] and values [H, d], none rotated."""
        normed = self.normed(layer, hidden)
        q, k, v = (self._linear(f"model.layers.{layer}.self_attn.{x}_proj", normed) for x in "qkv")
        rows = (self.num_heads, self.head_dim)
        return q.reshape(self.num_heads, self.group, self.head_dim), k.reshape(rows), v.reshape(rows)

    def join(self, layer: int, attended: Array) -> Array:
        """What attention adds to the hidden state."""
        return self._linear(f"model.layers.{layer}.self_attn.o_proj", attended.ravel())

    def normed(self, layer: int, hidden: Array) -> Array:
        """What attention is computed from."""
        return self._norm(f"model.layers.{layer}.input_layernorm", hidden)

    def output_of(self, layer: int, head: int) -> Array:
        """What a query head adds to the hidden state for what it read, [hidden, d]."""
        weight = self._weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        return weight[:, head * self.head_dim : (head + 1) * self.head_dim]

    def feed(self, layer: int, hidden: Array) -> Array:
        """What the rest of the layer adds to the hidden state."""
        name = f"model.layers.{layer}"
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gate = self._linear(f"{name}.mlp.gate_proj", normed)
        up = self._linear(f"{name}.mlp.up_proj", normed)
        return self._linear(f"{name}.mlp.down_proj", gate / (1.0 + np.exp(-gate)) * up)

    def logprobs(self, hidden: Array) -> Array:
        logits = self._linear("lm_head", self._norm("model.norm", hidden))
        return logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())

    def rotate(self, x: Array, position: int) -> Array:
        """x, [..., d], at a position."""
        half = self.head_dim // 2
        angle = position * self._theta ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    def _norm(self, name: str, x: Array) -> Array:
        return x / math.sqrt((x * x).mean() + self._eps) * self._weights[f"{name}.weight"]

    def _linear(self, name: str, x: Array) -> Array:
        return self._weights[f"{name}.weight"] @ x


# -- what is held --------------------------------------------------------------------------------------------------


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
        query, rotated_query: [room, g, d], by token.
        paid: [g, room, room], what query head h of token i paid to the KV of token j.
        saw: [room, room], whether the KV of token j was there when token i attended.
        out: [g, room, d], what the query heads of token i got.
        at_question_end: tokens whose KVs were held when the last token of the context was computed.
    """

    def __init__(self, layer: int, head: int, room: int, group: int, head_dim: int) -> None:
        self.layer, self.head = layer, head
        self.held: list[Kv] = []
        self.key, self.rotated, self.value = (np.zeros((room, head_dim)) for _ in range(3))
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
        tokens = self.tokens
        logits = queries @ self.rotated[tokens].T / math.sqrt(queries.shape[1])
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        self.paid[:, token, tokens] = p
        self.saw[token, tokens] = True
        self.out[:, token] = p @ self.value[tokens]
        return self.out[:, token]


@dataclass(frozen=True)
class Worth:
    value: float
    error: float = 0.0
    """How far float32 may be off."""
    ties: bool = True
    """Whether what is equal here is equal in float32 too, because it comes from the same numbers."""


# -- the sequence --------------------------------------------------------------------------------------------------


class DenseSequence:
    """A prompt and its answer under a policy.

    Args:
        budget: C of the docs, KVs per row on average (of the request, or what the policy fixes).
        template_tail: tokens at the context's end that follow the question.
        kinds: by token id, for the budget `Recipes`.
        asks: tokens that ask for the first chunk of a replay, and for each later one.
        room: most tokens that will be computed.

    Attributes:
        logprobs: for each computed token, of the token after it, [V].
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
        kinds: Sequence[int] | None = None,
        asks: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        self._asks = asks
        self.policy = policy
        self.prompt_len = prompt_len
        self.context_len = prompt_len if context_len is None else context_len
        self.question_end = self.context_len - template_tail
        self.computed = 0
        self.last_round = 0
        self._last_inner_round = 0  # within the context; windows do not reach back over it
        self._round_before_question_end = 0
        self.num_rounds = 0
        self.shift = 0
        self.logprobs: list[Array] = []
        self.unsure_from: int | None = None
        self.token_ids: list[int] = []
        self._model = model
        self._block_size = block_size
        self._spans = list(spans)
        self._kinds = kinds
        when = policy.when
        if isinstance(policy.budget, Recipes):
            budget = 1  # it takes what it needs, and asks at every round
        elif isinstance(policy.budget, Fixed):
            budget = policy.budget.kvs
        self.limit = budget if when.within else budget + (when.prefill_every or 0)
        self.target = budget - (when.prefill_every or 0) if when.within else budget
        recent = policy.keep.recent
        self.recent = (
            _share(recent, max(self.target - policy.keep.sinks, 0)) if isinstance(recent, float) else recent
        )
        self.rows = [
            [Row(layer, head, room, model.group, model.head_dim) for head in range(model.num_heads)]
            for layer in range(model.num_layers)
        ]
        self._cosines: list[list[float]] = [[] for _ in self.rows]

    @property
    def all_rows(self) -> list[Row]:
        return [row for layer in self.rows for row in layer]

    # -- computing -------------------------------------------------------------------------------------------------

    def advance(self, token_ids: Sequence[int], to: int) -> None:
        """Compute the tokens before index `to`, with the rounds that the policy alone asks for."""
        while self.computed < to:
            if self._is_due():
                self.shrink()
            self._compute(token_ids[self.computed])

    def _compute(self, token_id: int) -> None:
        token, model = self.computed, self._model
        position = token - self.shift
        hidden = model.embed(token_id)
        for layer, rows in enumerate(self.rows):
            q, k, v = model.project(layer, hidden)
            turned_q, turned_k = model.rotate(q, position), model.rotate(k, position)
            for row in rows:
                row.held.append(Kv(token, position))
                row.key[token], row.value[token] = k[row.head], v[row.head]
                row.rotated[token] = turned_k[row.head]
                row.query[token], row.rotated_query[token] = q[row.head], turned_q[row.head]
            attended = np.stack([row.attend(token, turned_q[row.head]) for row in rows])
            after = hidden + model.join(layer, attended)
            self._cosines[layer].append(_cosine(hidden, after))
            hidden = after + model.feed(layer, after)
        self.logprobs.append(model.logprobs(hidden))
        self.token_ids.append(token_id)
        self.computed += 1
        if self.computed == self.question_end:
            self._round_before_question_end = self._last_inner_round
            for row in self.all_rows:
                row.at_question_end = row.tokens

    # -- when ------------------------------------------------------------------------------------------------------

    def holds_too_much(self) -> bool:
        """Whether a round now would be one: rows hold more than it leaves, and tokens came since the last."""
        return self._mean() > self.target and self.computed != self.last_round

    def _mean(self) -> Fraction:
        return Fraction(sum(len(row.held) for row in self.all_rows), len(self.all_rows))

    def _is_due(self) -> bool:
        when, t = self.policy.when, self.computed
        if not self.holds_too_much():
            return False
        if t < self.context_len:
            if when.prefill_every is None:
                return False
            return t in range(self.limit, self.context_len, when.prefill_every)
        if t == self.context_len and when.after_prefill:
            return True
        if t < self.prompt_len or when.decode_every is None:
            return False
        if when.within:
            return self._mean() >= self.limit
        return t - max(self.last_round, self.prompt_len) >= when.decode_every

    # -- a round ---------------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        gone = self._choose()
        for row, tokens in gone:
            row.held = [kv for kv in row.held if kv.token not in tokens]
            if self.policy.reassign_positions:
                for place, kv in enumerate(row.held):
                    kv.position = place
                    row.rotated[kv.token] = self._model.rotate(row.key[kv.token], place)
        if self.policy.reassign_positions:
            self.shift = self.computed - len(self.rows[0][0].held)
        self.last_round = self.computed
        if self.computed < self.context_len:
            self._last_inner_round = self.computed
        self.num_rounds += 1

    def _choose(self) -> list[tuple[Row, set[int]]]:
        """The KVs that go, by token."""
        policy = self.policy
        if isinstance(policy.budget, Recipes):
            return [(row, set(row.tokens) - self._recipe(row, policy.budget)) for row in self.all_rows]
        if isinstance(policy.score, MeanDeviation):
            return [(row, self._steady_and_low(row)) for row in self.all_rows]
        worths = {(row.layer, row.head): self.worths(row) for row in self.all_rows}
        chosen = []
        for row, keep in zip(self.all_rows, self._keeps(worths), strict=True):
            free = self._free(row, worths[row.layer, row.head])
            keep = max(keep, len(row.held) - len(free))
            chosen.append((row, set(self._lowest(free, len(row.held) - keep))))
        return chosen

    def _protected(self, kv: Kv) -> bool:
        # The latest of all tokens, or within the template's tail of those before it.
        end = self.question_end if self.question_end < self.computed <= self.context_len else self.computed
        return (
            kv.position < self.policy.keep.sinks
            or end - 1 - self.shift - kv.position < self.recent
            or self.question_end <= kv.token < self.context_len
            or any(start <= kv.position < end for start, end in self._spans)
        )

    def _num_protected(self, row: Row) -> int:
        return sum(self._protected(kv) for kv in row.held)

    def _free(self, row: Row, worths: dict[int, Worth]) -> list[tuple[Worth, Order, int]]:
        """Worth, age and token of the KVs that may go; of two equals the older goes first."""
        return [(worths[kv.token], (kv.token,), kv.token) for kv in row.held if not self._protected(kv)]

    def _lowest(self, candidates: Sequence[tuple[Worth, Order, Any]], count: int) -> list[Any]:
        """The names of the `count` least worthy, and among equals those that come first in order."""
        ordered = sorted(candidates, key=lambda c: (c[0].value, c[1]))
        taken, left = ordered[: max(count, 0)], ordered[max(count, 0) :]
        for a, *_ in taken:
            for b, *_ in left:
                tie = a.value == b.value and a.ties and b.ties
                if not tie and a.value + a.error >= b.value - b.error:
                    self._doubt()
        return [name for _, _, name in taken]

    def _doubt(self) -> None:
        if self.unsure_from is None:
            self.unsure_from = self.computed

    # -- scores ----------------------------------------------------------------------------------------------------

    def worths(self, row: Row) -> dict[int, Worth]:
        """What each KV of the row is worth, by token."""
        score = self.policy.score
        if not score.per_layer:
            return self._worths(row, score)
        heads = [self._worths(r, score) for r in self.rows[row.layer]]
        return {
            j: Worth(
                sum(worths[j].value for worths in heads) / len(heads),
                max(worths[j].error for worths in heads),
                all(worths[j].ties for worths in heads),
            )
            for j in row.tokens
        }

    def _worths(self, row: Row, score: Score) -> dict[int, Worth]:
        if isinstance(score, ByValueNorm | ByOutputNorm):
            return self._times_factor(row, score)
        if isinstance(score, ExpectedAttention):
            return self._expected(row, score)
        if isinstance(score, ChunkAttention):
            received = self._in_chunks(row, score.chunk, score.skip)
            return {j: _relative(received[j], _UNSCALED) for j in row.tokens}
        if isinstance(score, Compactor):
            return self._compactor(row, score)
        if isinstance(score, Window):
            return self._observed(row, score.size, score.power, score.pool, score.group, score.continual)
        if isinstance(score, ValueAware):
            return self._observed(row, score.size, None, score.pool, Group.SUM, score.continual)
        if isinstance(score, Cumulative):  # and Average
            return self._cumulative(row, score)
        if isinstance(score, LastQuery):
            return self._last_query(row)
        if isinstance(score, BelowAverage):
            return {kv.token: self._below_average(row, kv.token, score.history) for kv in row.held}
        if isinstance(score, Recency):
            return {kv.token: Worth(kv.position) for kv in row.held}
        if isinstance(score, Random):
            return {kv.token: Worth(_hash(score.seed, kv.position, row.layer, row.head)) for kv in row.held}
        if isinstance(score, KeyNorm):
            # Turning a key keeps its norm, so equal tokens of the first layer are equal but for rounding.
            norms = {kv.token: _relative(-float(np.linalg.norm(row.key[kv.token]))) for kv in row.held}
            return {token: replace(norm, ties=False) for token, norm in norms.items()}
        if isinstance(score, KeyDifference):
            keys = {j: row.rotated[j] for j in row.tokens}
            mean = np.mean([key / np.linalg.norm(key) for key in keys.values()], axis=0)
            return {j: Worth(-_cosine(key, mean), RELATIVE) for j, key in keys.items()}
        if isinstance(score, Leverage):
            return self._leverage(row, score)
        if isinstance(score, Reconstruction):
            return self._reconstruction(score)[row.layer, row.head]
        if isinstance(score, Fitted):
            return {j: self._fitted(row, j) for j in row.tokens}
        raise TypeError(f"there is no rule here for {score}")

    def _times_factor(self, row: Row, score: ByValueNorm | ByOutputNorm) -> dict[int, Worth]:
        worths = {}
        for j, worth in self._worths(row, score.score).items():
            if isinstance(score, ByValueNorm):
                factor = float(np.linalg.norm(row.value[j]))
            else:
                group = len(row.paid)
                heads = range(row.head * group, (row.head + 1) * group)
                outputs = [self._model.output_of(row.layer, head) @ row.value[j] for head in heads]
                factor = float(np.mean([np.abs(output).sum() for output in outputs]))
            value = (worth.value + score.epsilon) * factor
            worths[j] = Worth(value, worth.error * factor + 2 * RELATIVE * value, ties=False)
        return worths

    def _expected(self, row: Row, score: ExpectedAttention) -> dict[int, Worth]:
        shares = [self._shares_to_come(r, score) for r in self.rows[row.layer]]
        most = max(max(share.values(), default=0.0) for share in shares)
        own = shares[row.head]
        return {j: _relative(own.get(j, most), 6) for j in row.tokens}

    def _shares_to_come(self, row: Row, score: ExpectedAttention) -> dict[int, float]:
        """By token, of those whose position counts."""
        model, end = self._model, min(self.computed, self.context_len)
        following = range(self.computed, self.computed + score.horizon)
        turn = np.mean([model.rotate(np.eye(model.head_dim), p) for p in following], axis=0).T
        tokens = [kv.token for kv in row.held if kv.position >= score.skip]
        keys, share = row.rotated[tokens], np.zeros(len(tokens))
        for head in range(model.group):
            queries = row.query[score.skip : end, head] / math.sqrt(model.head_dim)
            mean = turn @ queries.mean(axis=0)
            covariance = turn @ np.cov(queries.T, bias=True) @ turn.T
            logits = keys @ mean + np.einsum("ni,ij,nj->n", keys, covariance, keys) / 2
            p = np.exp(logits - logits.max())
            share += p / p.sum() / model.group
        return dict(zip(tokens, share.tolist(), strict=True))

    def _in_chunks(self, row: Row, chunk: int, skip: int) -> Array:
        """What the token of each KV got from its chunk, mean over the group, [room]."""
        received, end = np.zeros(len(row.key)), min(self.computed, self.context_len)
        for first in range(skip, end, chunk):
            tokens = range(first, min(first + chunk, end))
            for head in range(self._model.group):
                logits = row.rotated_query[tokens, head] @ row.rotated[tokens].T
                p = np.exp(logits - logits.max(axis=1, keepdims=True))
                received[tokens] += (p / p.sum(axis=1, keepdims=True)).sum(axis=0) / self._model.group
        return received

    def _compactor(self, row: Row, score: Compactor) -> dict[int, Worth]:
        layer = self.rows[row.layer]
        counted = {r.head: [kv.token for kv in r.held if not self._protected(kv)] for r in layer}
        attention: dict[tuple[int, int], Worth] = {}
        leverage: dict[tuple[int, int], Worth] = {}
        for r in layer:
            tokens = counted[r.head]
            received = self._in_chunks(r, score.chunk, score.sinks)
            seen = [_relative(received[j] * float(np.linalg.norm(r.value[j])), _UNSCALED) for j in tokens]
            rare = self._ridge_leverage(r.key[tokens], score.ridge) if tokens else []
            for place, j in enumerate(tokens):
                attention[r.head, j] = _pooled(seen, place, Smoothing(score.pool, "average"))
                leverage[r.head, j] = rare[place]
        weight = 1.0 - self.target / self.computed if score.blending is None else score.blending
        attended, unusual = _standard(attention), _standard(leverage)
        worths = {j: Worth(0.0) for j in row.tokens}
        for j in counted[row.head]:
            a, u = attended[row.head, j], unusual[row.head, j]
            worths[j] = Worth(weight * u.value + a.value, weight * u.error + a.error, ties=False)
        return worths

    def _reconstruction(self, score: Reconstruction) -> dict[tuple[int, int], dict[int, Worth]]:
        """By row: the largest probability of each KV while the context is repeated behind itself, chunk by chunk."""
        replay, context = score.replay, self.token_ids[: self.context_len]
        told = {(row.layer, row.head): dict.fromkeys(range(len(context)), 0.0) for row in self.all_rows}
        for start in range(0, len(context), replay.chunk):
            chunk = range(start, min(start + replay.chunk, len(context)))
            words = list(self._asks[0])
            if start and self._asks[1]:
                words = [*self._asks[1], *context[max(start - replay.starting, 0) : start]]
            sinks = range(min(self.policy.keep.sinks, start))
            token_ids = [*words, *(context[j] for j in chunk)]
            for name, paid in self._repeat(token_ids, [*sinks, *chunk], normalized=score.normalized):
                for j, p in paid.items():
                    told[name][j] = max(told[name][j], p)
        return {name: {j: _relative(p, 4) for j, p in row.items()} for name, row in told.items()}

    def _repeat(
        self, token_ids: Sequence[int], judged: Sequence[int], *, normalized: bool
    ) -> Iterator[tuple[tuple[int, int], dict[int, float]]]:
        """Compute tokens behind the context, and forget them.

        Yields for each of them and each row what the group pays at most to the KVs of `judged`, in a softmax over
        those and the tokens computed here; `normalized`: times |W v| / |h|.
        """
        model, keys, values = self._model, {}, {}
        for row in self.all_rows:
            name = row.layer, row.head
            keys[name] = [row.rotated[j] for j in row.tokens]
            values[name] = [row.value[j] for j in row.tokens]

        @cache
        def outputs_of(row: Row) -> Array:
            """|W v| of each query head for each token of the context, [g, n]."""
            heads = range(row.head * model.group, (row.head + 1) * model.group)
            weights = np.stack([model.output_of(row.layer, head) for head in heads])
            return np.linalg.norm(weights @ row.value[: self.context_len].T, axis=1)

        for position, token_id in enumerate(token_ids, start=self.computed):
            hidden = model.embed(token_id)
            for layer, rows in enumerate(self.rows):
                q, k, v = model.project(layer, hidden)
                turned_q, turned_k = model.rotate(q, position), model.rotate(k, position)
                attended = []
                for row in rows:
                    name = row.layer, row.head
                    keys[name].append(turned_k[row.head])
                    values[name].append(v[row.head])
                    logits = turned_q[row.head] @ np.array(keys[name]).T / math.sqrt(model.head_dim)
                    attended.append(_softmax(logits) @ np.array(values[name]))
                    seen = [*judged, *range(self.context_len, len(keys[name]))]
                    paid = _softmax(logits[:, seen])[:, : len(judged)]
                    if normalized:
                        outputs = outputs_of(row)
                        paid = paid * outputs[:, list(judged)] / np.linalg.norm(model.normed(layer, hidden))
                    yield name, {j: float(p) for j, p in zip(judged, paid.max(axis=0), strict=True)}
                after = hidden + model.join(layer, np.stack(attended))
                hidden = after + model.feed(layer, after)

    def _fitted(self, row: Row, token: int) -> Worth:
        """By the random predictor that lies beside the model."""
        key, value = row.key[token], row.value[token]
        predictor = random_predictor(len(self.rows), len(self.rows[0]), len(key))
        offset, slope, inner, bias, outer = (
            getattr(predictor, name)[row.layer, row.head].double().numpy()
            for name in ("offset", "slope", "inner", "inner_bias", "outer")
        )
        norms = [math.log(np.linalg.norm(each)) for each in (key, value)]
        x = np.array([*key, *value, *norms])
        units = x @ inner + bias
        told = math.exp(float(offset + slope @ x + outer @ (units / (1.0 + np.exp(-units)))))
        size = float(np.abs(slope) @ np.abs(x) + np.abs(outer) @ (np.abs(inner).T @ np.abs(x)))
        return Worth(told, _OF_KEYS * told * (1.0 + size), ties=False)

    def _leverage(self, row: Row, score: Leverage) -> dict[int, Worth]:
        worths = self._ridge_leverage((row.key if score.unrotated else row.rotated)[row.tokens], score.ridge)
        if score.pool is not None:
            worths = [_pooled(worths, place, score.pool) for place in range(len(worths))]
        return dict(zip(row.tokens, worths, strict=True))

    def _ridge_leverage(self, keys: Array, of_mean: float) -> list[Worth]:
        """By the Gram matrix of the keys, [n, n], whose ridge leverage scores are those of the keys."""
        keys = keys - keys.mean(axis=0)
        n, d = keys.shape
        gram = keys @ keys.T
        ridge = of_mean * max(np.trace(gram) / d, 1e-9)
        told = n * np.diag(gram @ np.linalg.inv(gram + ridge * np.eye(n)))
        # What is off in a key counts more in directions in which keys hardly differ.
        return [_relative(value, 2) for value in told.tolist()]

    def _cumulative(self, row: Row, score: Cumulative) -> dict[int, Worth]:
        told = _aggregate(row.paid[:, : self.computed] ** score.power, score.group)
        worths = {}
        for j in row.tokens:
            total = told[j + score.exclude_first :, j].sum()
            if isinstance(score, Average):
                total /= max(1, self.computed - j - score.exclude_first)
            worths[j] = _relative(total, score.power)
        return worths

    def _last_query(self, row: Row) -> dict[int, Worth]:
        paid = row.paid[:, self.computed - 1].sum(axis=0)
        return {j: _relative(paid[j]) for j in row.tokens}

    def _below_average(self, row: Row, j: int, history: int) -> Worth:
        end, first, _ = self._window(row, history)
        queries = list(range(first, end)) if self.last_round < end else []
        if self.computed > self.context_len:
            queries += range(max(self.context_len, self.last_round), self.computed)
        count, close = 0, 0
        for i in queries:
            for h in range(len(row.paid)):
                if row.saw[i, j]:
                    p, average = row.paid[h, i, j], 1.0 / row.saw[i].sum()
                    count += p < average
                    close += abs(p - average) <= RELATIVE * average
        return Worth(-count, close, ties=not close)

    def _observed(
        self, row: Row, size: int, power: int | None, pool: Smoothing | None, group: Group, continual: bool
    ) -> dict[int, Worth]:
        """Window scores of the context, pooled, and what later queries add. `power` None: the value-aware term."""
        end, first, tokens = self._window(row, size)
        sums = {j: self._terms(row, range(first, end), j, power).sum(axis=1) for j in tokens}
        place = {
            j: n for n, j in enumerate(j for j in tokens if not (pool and pool.skip_window and j >= first))
        }
        neighbours = list(place)

        def pooled(values: dict[int, Array]) -> dict[int, Array]:
            if pool is None:
                return values
            result = {}
            for j, n in place.items():
                around = [values[k] for k in neighbours[max(n - pool.size // 2, 0) : n + pool.size // 2 + 1]]
                total = np.max(around, axis=0) if pool.kind == "max" else np.sum(around, axis=0) / pool.size
                result[j] = total
            return result

        if pool is not None and pool.per_query_head:
            told = {j: _aggregate(x, group) for j, x in pooled(sums).items()}
        else:
            told = pooled({j: _aggregate(x, group) for j, x in sums.items()})
        worths = {}
        for j in row.tokens:
            value = told.get(j, np.zeros(2))
            if continual:
                later = self._terms(row, range(self.context_len, self.computed), j, power)
                value = value + _aggregate(later, group).sum(axis=0)
            worths[j] = Worth(*value.tolist())
        return worths

    def _window(self, row: Row, size: int) -> tuple[int, int, list[int]]:
        """The end and the first of the last queries before a round, and the tokens that the row held then."""
        if self.computed < self.question_end:
            return self.computed, max(self.computed - size, self._last_inner_round), row.tokens
        first = max(self.question_end - size, self._round_before_question_end)
        return self.question_end, first, row.at_question_end

    def _terms(self, row: Row, queries: range, j: int, power: int | None) -> Array:
        """What each query head of each query adds to the KV of token j, and its error: [g, n, 2]."""
        p = row.paid[:, queries, j]
        if power is not None:
            return np.stack([p**power, power * RELATIVE * p**power], axis=-1)
        v, o, least = row.value[j], row.out[:, queries], 1e-4
        rest, far = 1.0 - p, ((v - o) ** 2).sum(axis=-1)
        off_rest = RELATIVE * rest + ROUNDING
        off_far = RELATIVE * far + 2 * ROUNDING * (v @ v + (o * o).sum(axis=-1))
        value = (p / np.maximum(rest, least)) ** 2 * far
        high = (p * (1 + RELATIVE) / np.maximum(rest - off_rest, least)) ** 2 * (far + off_far)
        low = (p * (1 - RELATIVE) / np.maximum(rest + off_rest, least)) ** 2 * np.maximum(far - off_far, 0.0)
        return np.stack([value, np.maximum(high - value, value - low)], axis=-1)

    def _steady_and_low(self, row: Row) -> set[int]:
        """MeanDeviation: of those with the least deviation, the ones with the lowest mean."""
        score = self.policy.score
        assert isinstance(score, MeanDeviation) and type(self.policy.budget) in (EqualHeads, Fixed)
        means, deviations = {}, {}
        told = _aggregate(row.paid[:, : self.computed], score.group)
        for j in row.tokens:
            n = self.computed - j
            a = told[j:, j]
            mean, square = float(a.sum()) / n, float((a * a).sum()) / n
            variance, off = max(square - mean * mean, 0.0), RELATIVE * (square + mean * mean)
            root = math.sqrt(variance)
            means[j] = _relative(mean)
            deviations[j] = Worth(
                root, max(math.sqrt(variance + off) - root, root - math.sqrt(max(variance - off, 0.0)))
            )
        protected, length = self._num_protected(row), len(row.held)
        keep = max(self.target, protected)
        feasible = self._lowest(
            self._free(row, deviations), max(self.target - protected, length - self.target)
        )
        low = [entry for entry in self._free(row, means) if entry[2] in feasible]
        return set(self._lowest(low, length - keep))

    # -- budgets ---------------------------------------------------------------------------------------------------

    def _keeps(self, worths: dict[tuple[int, int], dict[int, Worth]]) -> list[int]:
        """What each row keeps, in the order of `all_rows`; not yet raised to what is protected."""
        budget = self.policy.budget
        if isinstance(budget, AdaptiveRows):
            return self._cheapest_blocks(worths)
        if isinstance(budget, LazyLayers):
            return [
                max(self.target, self._least(row)) if self._is_lazy(row, budget.threshold) else len(row.held)
                for row in self.all_rows
            ]
        assert isinstance(budget, EqualHeads | AdaptiveHeads)
        shares = self._raised(self._layer_shares(budget.layers))
        if isinstance(budget, AdaptiveHeads):
            return [
                keep
                for layer, share in zip(self.rows, shares, strict=True)
                for keep in self._compete(layer, share, budget.floor, worths)
            ]
        return [shares[row.layer] for row in self.all_rows]

    def _floor(self, floor: float) -> int:
        """A floor in KVs."""
        return _share(floor, self.target) if isinstance(floor, float) else min(floor, self.target)

    def _narrow_least(self, layer: int) -> int:
        """What each row of a layer must be able to keep if the layer is not a wide one."""
        budget = self.policy.budget
        protected = max(self._num_protected(row) for row in self.rows[layer])
        return max(self._floor(budget.row_floor), self._floor(budget.layer_floor), protected)

    def _wide(self, layer: int) -> int:
        """What each row of a wide layer keeps at least."""
        budget, num_layers = self.policy.budget, len(self.rows)
        wide = min(budget.wide_layers, num_layers)
        wanted = max(len(row.held) for row in self.rows[layer])
        if budget.wide_factor is not None:
            wanted = min(wanted, _share(budget.wide_factor, self.target))
        if isinstance(budget, LazyLayers):
            return wanted
        left = self.target * num_layers - sum(self._narrow_least(n) for n in range(wide, num_layers))
        return min(wanted, max(left // wide, self.target))

    def _least(self, row: Row) -> int:
        """What a row keeps at least."""
        least = self._floor(self.policy.budget.row_floor)
        if row.layer < self.policy.budget.wide_layers:
            least = max(least, self._wide(row.layer))
        return min(least, len(row.held))

    def _raised(self, shares: list[int]) -> list[int]:
        """Shares of layers, none below its floor; the others pay in proportion to what they have above theirs."""
        budget = self.policy.budget
        if not (budget.row_floor or budget.layer_floor or budget.wide_layers):
            return shares
        least = [self._narrow_least(layer) for layer in range(len(shares))]
        for layer in range(min(budget.wide_layers, len(shares))):
            least[layer] = max(least[layer], self._wide(layer))
        above = [max(share - floor, 0) for share, floor in zip(shares, least, strict=True)]
        room = max(sum(shares) - sum(least), 0)
        return [floor + part * room // max(sum(above), 1) for floor, part in zip(least, above, strict=True)]

    def _layer_shares(self, split: object) -> list[int]:
        c, num_layers = self.target, len(self.rows)
        if isinstance(split, Pyramid):
            w, t = self.recent, self.computed
            if self.question_end < t <= self.context_len:
                w += t - self.question_end
            base = c - w
            if t < 2 * base:
                return [c] * num_layers
            low = base // split.beta
            high = 2 * base - low
            if high >= t - w:
                high = t - w
                low = 2 * base - high
            step = (high - low) // (num_layers - 1)
            return [high - layer * step + w for layer in range(num_layers)]
        if isinstance(split, LayerGroups):
            similar = self._most_similar_layers()
            little = _share(split.share, c)
            much = (num_layers * c - len(similar) * little) // (num_layers - len(similar))
            return [little if layer in similar else much for layer in range(num_layers)]
        return [c] * num_layers

    def _most_similar_layers(self) -> set[int]:
        """The group of the highest cosines: three groups with the least squared distance to their means."""
        told = [float(np.mean(cosines[: self.prompt_len])) for cosines in self._cosines]
        order = sorted(range(len(told)), key=lambda layer: told[layer])
        splits = []
        for i, j in combinations(range(1, len(order)), 2):
            parts = [[told[layer] for layer in part] for part in (order[:i], order[i:j], order[j:])]
            splits.append((sum(float(np.var(part)) * len(part) for part in parts), set(order[j:])))
        splits.sort(key=lambda split: split[0])
        best = splits[0]
        if any(rest <= best[0] + RELATIVE and group != best[1] for rest, group in splits[1:]):
            self._doubt()
        return best[1]

    def _compete(
        self, layer: list[Row], share: int, floor: float, worths: dict[tuple[int, int], dict[int, Worth]]
    ) -> list[int]:
        """AdaptiveHeads."""
        protected = [self._num_protected(row) for row in layer]
        b = [max(share - p, 0) for p in protected]
        free = [self._free(row, worths[row.layer, row.head]) for row in layer]
        candidates = []
        for row, entries, p in zip(layer, free, protected, strict=True):
            guarded = max(self._least(row) - p, 0) if self._has_floors else 0
            safe = set(row.tokens) - set(self._lowest(entries, len(entries) - guarded)) if guarded else set()
            candidates += [
                (w, (row.head, *order), row.head) for w, order, token in entries if token not in safe
            ]
        lost = self._lowest(candidates, sum(len(entries) for entries in free) - sum(b))
        keeps = []
        for row, entries, own, p in zip(layer, free, b, protected, strict=True):
            n = len(entries) - lost.count(row.head)
            keeps.append(round(n * (1 - Fraction(str(floor))) + _share(floor, own)) + p)
        return keeps

    def _cheapest_blocks(self, worths: dict[tuple[int, int], dict[int, Worth]]) -> list[int]:
        """AdaptiveRows."""
        b = self._block_size
        allowed = math.ceil(Fraction(self.target * len(self.all_rows), b))
        excess = sum(math.ceil(len(row.held) / b) for row in self.all_rows) - allowed
        steps: dict[tuple[int, int], list[int]] = {}
        candidates: list[tuple[Worth, Order, Any]] = []
        for row in self.all_rows:
            ranked = sorted(
                self._free(row, worths[row.layer, row.head]), key=lambda entry: (entry[0].value, entry[1])
            )
            must_go = len(row.held) % b or b
            steps[row.layer, row.head] = []
            least = self._least(row) if self._has_floors else 0
            while must_go <= len(ranked) and len(row.held) - must_go >= max(least, 0) and len(row.held) > 0:
                candidates.append(
                    (
                        ranked[must_go - 1][0],
                        (row.layer, row.head, len(steps[row.layer, row.head])),
                        (row.layer, row.head),
                    )
                )
                steps[row.layer, row.head].append(must_go)
                must_go += b
        if self._has_floors:
            candidates = self._within_layers(candidates)
        freed = self._lowest(candidates, excess)
        return [
            len(row.held)
            - (steps[row.layer, row.head][count - 1] if (count := freed.count((row.layer, row.head))) else 0)
            for row in self.all_rows
        ]

    @property
    def _has_floors(self) -> bool:
        budget = self.policy.budget
        return bool(budget.row_floor or budget.layer_floor or budget.wide_layers)

    def _within_layers(self, candidates: list[tuple[Worth, Order, Any]]) -> list[tuple[Worth, Order, Any]]:
        """Of blocks that could go, those that each layer can spare."""
        spared = []
        for layer, rows in enumerate(self.rows):
            floor = self._floor(self.policy.budget.layer_floor) * len(rows)
            held = sum(math.ceil(len(row.held) / self._block_size) for row in rows)
            own = [candidate for candidate in candidates if candidate[1][0] == layer]
            named = [(worth, order, (worth, order, name)) for worth, order, name in own]
            spared += self._lowest(named, held - math.ceil(floor / self._block_size))
        return spared

    def _is_lazy(self, row: Row, threshold: float) -> bool:
        last = self.computed - 1
        heads = [
            sum(r.paid[h, last, kv.token] for kv in r.held if self._protected(kv))
            for r in self.rows[row.layer]
            for h in range(len(r.paid))
        ]
        mean = sum(heads) / len(heads)
        if abs(mean - threshold) <= RELATIVE:
            self._doubt()
        return mean > threshold

    def _recipe(self, row: Row, budget: Recipes) -> set[int]:
        """The tokens that stay."""
        assert self._kinds is not None
        worths = self.worths(row)
        kinds = {j: self._kinds[self.token_ids[j]] for j in row.tokens}
        total = sum(worth.value for worth in worths.values())
        everything = [(worths[j], (j,), j) for j in row.tokens]
        ladder = [
            lambda: {j for j in row.tokens if kinds[j] == SPECIAL},
            lambda: {j for j in row.tokens if kinds[j] == PUNCTUATION},
            lambda: (
                set(row.tokens)
                - set(self._lowest(everything, len(everything) - _share(budget.heavy, len(everything))))
            ),
            lambda: {j for j in row.tokens if j >= self.computed - _share(budget.local, self.computed)},
        ]
        kept = {kv.token for kv in row.held if self._protected(kv)}
        for rung in ladder:
            kept |= rung()
            recovered = sum(worths[j].value for j in kept)
            if abs(recovered - budget.recovery * total) <= RELATIVE * total:
                self._doubt()
            if recovered >= budget.recovery * total:
                return kept
        return set(row.tokens)


# -- small things --------------------------------------------------------------------------------------------------


def _share(share: float, of: int) -> int:
    """floor(share * of) of the decimal that was written."""
    return math.floor(Fraction(str(share)) * of)


def _relative(value: float, times: int = 1) -> Worth:
    """Float32 knows it only up to `RELATIVE`, a few `times` over."""
    return Worth(value, times * RELATIVE * abs(value))


def _pooled(worths: list[Worth], place: int, pool: Smoothing) -> Worth:
    """Of the KVs around a place: the most, or the sum over the pool's size. Equals here may differ in float32."""
    around = worths[max(place - pool.size // 2, 0) : place + pool.size // 2 + 1]
    if pool.kind == "max":
        return max(around, key=lambda worth: worth.value)
    value, error = (
        sum(column) / pool.size for column in zip(*((w.value, w.error) for w in around), strict=True)
    )
    return Worth(value, error, ties=False)


def _standard(worths: dict[tuple[int, int], Worth]) -> dict[tuple[int, int], Worth]:
    """Less their mean, divided by their standard deviation."""
    values = [worth.value for worth in worths.values()]
    mean, count = sum(values) / max(len(values), 1), max(len(values), 2)
    deviation = max(math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1)), 1e-6)
    off = max((worth.error for worth in worths.values()), default=0.0) / deviation
    return {
        name: Worth((worth.value - mean) / deviation, worth.error / deviation + off / 4, ties=False)
        for name, worth in worths.items()
    }


def _aggregate(x: Array, group: Group) -> Array:
    """Query heads, the first dimension of x, to one."""
    if group is Group.MAX:
        return x.max(axis=0)
    return x.sum(axis=0) / (len(x) if group is Group.MEAN else 1)


def _softmax(logits: Array) -> Array:
    """Over the last dimension."""
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def _hash(seed: int, position: int, layer: int, head: int) -> int:
    """The preset `random` draws from 32 bits: multiplied, shifted, mixed; 24 of them count."""
    mask = 0xFFFFFFFF
    x = (position * 0x9E3779B1 + (layer * 8191 + head) * 0x85EBCA77 + seed * 0xC2B2AE3D) & mask
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & mask
    x = ((x ^ (x >> 12)) * 0x297A2D39) & mask
    return (x ^ (x >> 15)) >> 8
