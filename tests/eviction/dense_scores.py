"""The score of a KV, computed anew at every round from all the attention that it was ever paid."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from dense_model import OF_KEYS, RELATIVE, ROUNDING, UNSCALED, Array, aggregate, cosine, drawn, softmax
from dense_state import DenseState, Row, Score, pool_scores, relative, standardized
from random_predictor import random_predictor

from winnow.attention import Group, Smoothing
from winnow.eviction import (
    Average,
    BelowAverage,
    ByKeyDeviation,
    ByOutputNorm,
    ByValueNorm,
    ChunkAttention,
    Compactor,
    Cumulative,
    EqualHeads,
    ExpectedAttention,
    Fitted,
    Fixed,
    KeyDeviation,
    KeyDifference,
    KeyNorm,
    LastQuery,
    Leverage,
    MeanDeviation,
    Random,
    Recency,
    Reconstruction,
    Scorer,
    ValueAware,
    Window,
)


class DenseScores(DenseState):
    """The scorers' formulas."""

    def scores(self, row: Row) -> dict[int, Score]:
        """The score of each KV of the row, by token."""
        scorer = self.policy.score
        if not scorer.per_layer:
            return self._scores(row, scorer)
        heads = [self._scores(r, scorer) for r in self.rows[row.layer]]
        return {
            j: Score(
                sum(scores[j].value for scores in heads) / len(heads),
                max(scores[j].error for scores in heads),
                all(scores[j].ties for scores in heads),
            )
            for j in row.tokens
        }

    def _scores(self, row: Row, scorer: Scorer) -> dict[int, Score]:
        if isinstance(scorer, ByKeyDeviation | ByValueNorm | ByOutputNorm):
            return self._times_factor(row, scorer)
        if isinstance(scorer, ExpectedAttention):
            return self._expected(row, scorer)
        if isinstance(scorer, ChunkAttention):
            received = self._in_chunks(row, scorer.chunk, scorer.skip)
            return {j: relative(received[j], UNSCALED) for j in row.tokens}
        if isinstance(scorer, Compactor):
            return self._compactor(row, scorer)
        if isinstance(scorer, Window):
            return self._observed(row, scorer.size, scorer.power, scorer.pool, scorer.group, scorer.continual)
        if isinstance(scorer, ValueAware):
            return self._observed(row, scorer.size, None, scorer.pool, Group.SUM, scorer.continual)
        if isinstance(scorer, Cumulative):  # and Average
            return self._cumulative(row, scorer)
        if isinstance(scorer, LastQuery):
            return self._last_query(row)
        if isinstance(scorer, BelowAverage):
            return {kv.token: self._below_average(row, kv.token, scorer.history) for kv in row.held}
        if isinstance(scorer, Recency):
            return {kv.token: Score(kv.position) for kv in row.held}
        if isinstance(scorer, Random):
            return {kv.token: Score(drawn(scorer.seed, kv.position, row.layer, row.head)) for kv in row.held}
        if isinstance(scorer, KeyNorm):
            # Turning a key keeps its norm, so equal tokens of the first layer are equal but for rounding.
            norms = {kv.token: relative(-float(np.linalg.norm(row.key[kv.token]))) for kv in row.held}
            return {token: replace(norm, ties=False) for token, norm in norms.items()}
        if isinstance(scorer, KeyDifference):
            keys = {j: row.rotated[j] for j in row.tokens}
            mean = np.mean([key / np.linalg.norm(key) for key in keys.values()], axis=0)
            return {j: Score(-cosine(key, mean), RELATIVE) for j, key in keys.items()}
        if isinstance(scorer, KeyDeviation):
            seen = row.key[: self.computed]  # evicted ones too
            mean = np.mean(seen / np.linalg.norm(seen, axis=-1, keepdims=True), axis=0)
            # Equal tokens of the first layer have equal keys but for rounding.
            scores = {j: Score(1.0 - cosine(row.key[j], mean), 4 * RELATIVE) for j in row.tokens}
            return {token: replace(score, ties=False) for token, score in scores.items()}
        if isinstance(scorer, Leverage):
            return self._leverage(row, scorer)
        if isinstance(scorer, Reconstruction):
            return self._reconstruction(scorer)[row.layer, row.head]
        if isinstance(scorer, Fitted):
            return {j: self._fitted(row, j) for j in row.tokens}
        raise TypeError(f"there is no rule here for {scorer}")

    def _times_factor(
        self, row: Row, scorer: ByKeyDeviation | ByValueNorm | ByOutputNorm
    ) -> dict[int, Score]:
        scores = {}
        deviations = self._scores(row, KeyDeviation()) if isinstance(scorer, ByKeyDeviation) else {}
        for j, score in self._scores(row, scorer.inner).items():
            if isinstance(scorer, ByKeyDeviation):
                least = max(score.value - score.error, 0.0) ** scorer.power
                most, root = (score.value + score.error) ** scorer.power, score.value**scorer.power
                value, factor = root * deviations[j].value, deviations[j]
                error = (
                    max(most - root, root - least) * factor.value + root * factor.error + 2 * RELATIVE * value
                )
                scores[j] = Score(value, error, ties=False)
                continue
            if isinstance(scorer, ByValueNorm):
                factor = float(np.linalg.norm(row.value[j]))
            else:
                group = len(row.paid)
                heads = range(row.head * group, (row.head + 1) * group)
                outputs = [self._model.output_of(row.layer, head) @ row.value[j] for head in heads]
                factor = float(np.mean([np.abs(output).sum() for output in outputs]))
            value = (score.value + scorer.epsilon) * factor
            scores[j] = Score(value, score.error * factor + 2 * RELATIVE * value, ties=False)
        return scores

    def _expected(self, row: Row, scorer: ExpectedAttention) -> dict[int, Score]:
        shares = [self._shares_to_come(r, scorer) for r in self.rows[row.layer]]
        most = max(max(share.values(), default=0.0) for share in shares)
        own = shares[row.head]
        return {j: relative(own.get(j, most), 6) for j in row.tokens}

    def _shares_to_come(self, row: Row, scorer: ExpectedAttention) -> dict[int, float]:
        """By token, of those whose position counts."""
        model, end = self._model, min(self.computed, self.context_len)
        following = range(self.computed, self.computed + scorer.horizon)
        turn = np.mean([model.rotate(np.eye(model.head_dim), p) for p in following], axis=0).T
        tokens = [kv.token for kv in row.held if kv.position >= scorer.skip]
        keys, share = row.rotated[tokens], np.zeros(len(tokens))
        for head in range(model.group):
            queries = row.query[scorer.skip : end, head] / math.sqrt(model.head_dim)
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
                logits = row.rotated_query[tokens, head] @ row.fresh[tokens].T
                p = np.exp(logits - logits.max(axis=1, keepdims=True))
                received[tokens] += (p / p.sum(axis=1, keepdims=True)).sum(axis=0) / self._model.group
        return received

    def _compactor(self, row: Row, scorer: Compactor) -> dict[int, Score]:
        layer = self.rows[row.layer]
        counted = {r.head: [kv.token for kv in r.held if not self._protected(kv)] for r in layer}
        attention: dict[tuple[int, int], Score] = {}
        leverage: dict[tuple[int, int], Score] = {}
        for r in layer:
            tokens = counted[r.head]
            received = self._in_chunks(r, scorer.chunk, scorer.sinks)
            seen = [relative(received[j] * float(np.linalg.norm(r.value[j])), UNSCALED) for j in tokens]
            rare = self._ridge_leverage(r.key[tokens], scorer.ridge) if tokens else []
            for place, j in enumerate(tokens):
                attention[r.head, j] = pool_scores(seen, place, Smoothing(scorer.pool, "average"))
                leverage[r.head, j] = rare[place]
        weight = 1.0 - self.target / self.computed if scorer.blending is None else scorer.blending
        attended, unusual = standardized(attention), standardized(leverage)
        scores = {j: Score(0.0) for j in row.tokens}
        for j in counted[row.head]:
            a, u = attended[row.head, j], unusual[row.head, j]
            scores[j] = Score(weight * u.value + a.value, weight * u.error + a.error, ties=False)
        return scores

    def _reconstruction(self, scorer: Reconstruction) -> dict[tuple[int, int], dict[int, Score]]:
        """By row: the largest probability of each KV while the context is repeated behind itself, chunk by chunk."""
        replay, context = scorer.replay, self.token_ids[: self.context_len]
        highest = {(row.layer, row.head): dict.fromkeys(range(len(context)), 0.0) for row in self.all_rows}
        for start in range(0, len(context), replay.chunk):
            chunk = range(start, min(start + replay.chunk, len(context)))
            words = list(self._asks[0])
            if start and self._asks[1]:
                words = [*self._asks[1], *context[max(start - replay.starting, 0) : start]]
            sinks = range(min(self.policy.keep.sinks, start))
            token_ids = [*words, *(context[j] for j in chunk)]
            for name, paid in self._repeat(token_ids, [*sinks, *chunk], normalized=scorer.normalized):
                for j, p in paid.items():
                    highest[name][j] = max(highest[name][j], p)
        return {name: {j: relative(p, 4) for j, p in row.items()} for name, row in highest.items()}

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
                    attended.append(softmax(logits) @ np.array(values[name]))
                    seen = [*judged, *range(self.context_len, len(keys[name]))]
                    paid = softmax(logits[:, seen])[:, : len(judged)]
                    if normalized:
                        outputs = outputs_of(row)
                        paid = paid * outputs[:, list(judged)] / np.linalg.norm(model.normed(layer, hidden))
                    yield name, {j: float(p) for j, p in zip(judged, paid.max(axis=0), strict=True)}
                after = hidden + model.join(layer, np.stack(attended))
                hidden = after + model.feed(layer, after)

    def _fitted(self, row: Row, token: int) -> Score:
        """By the random predictor that lies beside the model."""
        x, heads = self._features[row.layer][token], len(self.rows[row.layer])
        predictor = random_predictor(len(self.rows), heads, row.key.shape[1], len(x) - 2 * heads)
        offset, slope, inner, bias, outer = (
            getattr(predictor, name)[row.layer].double().numpy()
            for name in ("offset", "slope", "inner", "inner_bias", "outer")
        )
        offset, slope, outer = offset[row.head], slope[:, row.head], outer[:, row.head]
        units = x @ inner + bias
        predicted = math.exp(float(offset + slope @ x + outer @ (units / (1.0 + np.exp(-units)))))
        size = float(np.abs(slope) @ np.abs(x) + np.abs(outer) @ (np.abs(inner).T @ np.abs(x)))
        return Score(predicted, OF_KEYS * predicted * (1.0 + size), ties=False)

    def _leverage(self, row: Row, scorer: Leverage) -> dict[int, Score]:
        scores = self._ridge_leverage(
            (row.key if scorer.unrotated else row.rotated)[row.tokens], scorer.ridge
        )
        if scorer.pool is not None:
            scores = [pool_scores(scores, place, scorer.pool) for place in range(len(scores))]
        return dict(zip(row.tokens, scores, strict=True))

    def _ridge_leverage(self, keys: Array, of_mean: float) -> list[Score]:
        """By the Gram matrix of the keys, [n, n], whose ridge leverage scores are those of the keys."""
        keys = keys - keys.mean(axis=0)
        n, d = keys.shape
        gram = keys @ keys.T
        ridge = of_mean * max(np.trace(gram) / d, 1e-9)
        leverage = n * np.diag(gram @ np.linalg.inv(gram + ridge * np.eye(n)))
        # What is off in a key counts more in directions in which keys hardly differ.
        return [relative(value, 2) for value in leverage.tolist()]

    def _cumulative(self, row: Row, scorer: Cumulative) -> dict[int, Score]:
        attention = aggregate(row.paid[:, : self.computed] ** scorer.power, scorer.group)
        scores = {}
        for j in row.tokens:
            total = attention[j + scorer.exclude_first :, j].sum()
            if isinstance(scorer, Average):
                total /= max(1, self.computed - j - scorer.exclude_first)
            scores[j] = relative(total, scorer.power)
        return scores

    def _last_query(self, row: Row) -> dict[int, Score]:
        paid = row.paid[:, self.computed - 1].sum(axis=0)
        return {j: relative(paid[j]) for j in row.tokens}

    def _below_average(self, row: Row, j: int, history: int) -> Score:
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
        return Score(-count, close, ties=not close)

    def _observed(
        self, row: Row, size: int, power: int | None, pool: Smoothing | None, group: Group, continual: bool
    ) -> dict[int, Score]:
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
            aggregated = {j: aggregate(x, group) for j, x in pooled(sums).items()}
        else:
            aggregated = pooled({j: aggregate(x, group) for j, x in sums.items()})
        scores = {}
        for j in row.tokens:
            value = aggregated.get(j, np.zeros(2))
            if continual:
                later = self._terms(row, range(self.context_len, self.computed), j, power)
                value = value + aggregate(later, group).sum(axis=0)
            scores[j] = Score(*value.tolist())
        return scores

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
        scorer = self.policy.score
        assert isinstance(scorer, MeanDeviation) and type(self.policy.budget) in (EqualHeads, Fixed)
        means, deviations = {}, {}
        attention = aggregate(row.paid[:, : self.computed], scorer.group)
        for j in row.tokens:
            n = self.computed - j
            a = attention[j:, j]
            mean, square = float(a.sum()) / n, float((a * a).sum()) / n
            variance, off = max(square - mean * mean, 0.0), RELATIVE * (square + mean * mean)
            root = math.sqrt(variance)
            means[j] = relative(mean)
            deviations[j] = Score(
                root, max(math.sqrt(variance + off) - root, root - math.sqrt(max(variance - off, 0.0)))
            )
        protected, length = self._num_protected(row), len(row.held)
        keep = max(self.target, protected)
        feasible = self._lowest(
            self._free(row, deviations), max(self.target - protected, length - self.target)
        )
        low = [entry for entry in self._free(row, means) if entry[2] in feasible]
        return set(self._lowest(low, length - keep))
