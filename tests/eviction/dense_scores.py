"""The score of a KV, computed anew at every round from all the attention that it was ever paid."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from dense_model import RELATIVE, WORDS, Array, aggregate, cosine, drawn, softmax
from dense_state import DenseState, Row, Score, pool_scores, relative

from winnow.attention import Group, Smoothing
from winnow.eviction import (
    Average,
    BelowAverage,
    ByKeyDeviation,
    BySentence,
    ByValueNorm,
    Cumulative,
    KeyDeviation,
    KeyDifference,
    KeyNorm,
    KeysWithin,
    LastQuery,
    Leverage,
    Random,
    Recency,
    Reconstruction,
    Scorer,
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
        if isinstance(scorer, KeysWithin):
            return self._scores(row, KeyDeviation() if self.computed < self.context_len else scorer.inner)
        if isinstance(scorer, ByKeyDeviation | ByValueNorm):
            return self._times_factor(row, scorer)
        if isinstance(scorer, BySentence):
            return self._by_sentence(row, scorer)
        if isinstance(scorer, Window):
            return self._observed(row, scorer.size, scorer.power, scorer.pool, scorer.group, scorer.continual)
        if isinstance(scorer, Cumulative):  # and Average
            return self._cumulative(row, scorer)
        if isinstance(scorer, LastQuery):
            return self._last_query(row)
        if isinstance(scorer, BelowAverage):
            return self._below_average(row, scorer.history)
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
            if self._replay_scores[0] != self.computed:  # one replay tells of all rows
                self._replay_scores = self.computed, self._reconstruction(scorer)
            return self._replay_scores[1][row.layer, row.head]
        raise TypeError(f"there is no rule here for {scorer}")

    def _by_sentence(self, row: Row, scorer: BySentence) -> dict[int, Score]:
        """The larger of the pooled score and a share of the sentence's largest; a mark or 64 tokens end a sentence."""
        sentence, length = [0], 1
        for token_id in self.token_ids[: self.computed - 1]:
            ends = WORDS[token_id] in (".", "?!") or length == 64
            sentence.append(sentence[-1] + ends)
            length = 1 if ends else length + 1
        scores = self._scores(row, scorer.inner)
        held = [scores[j] for j in row.tokens]
        found = {}
        for place, j in enumerate(row.tokens):
            same = [scores[i] for i in row.tokens if sentence[i] == sentence[j]]
            best = max(same, key=lambda score: score.value)
            lifted = replace(best, value=scorer.share * best.value, error=scorer.share * best.error)
            around = held[place] if scorer.pool is None else pool_scores(held, place, scorer.pool)
            found[j] = max(around, lifted, key=lambda score: score.value)
        return found

    def _times_factor(self, row: Row, scorer: ByKeyDeviation | ByValueNorm) -> dict[int, Score]:
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
            factor = float(np.linalg.norm(row.value[j]))
            value = (score.value + scorer.epsilon) * factor
            scores[j] = Score(value, score.error * factor + 2 * RELATIVE * value, ties=False)
        return scores

    def _reconstruction(self, scorer: Reconstruction) -> dict[tuple[int, int], dict[int, Score]]:
        """By row: the largest probability of each KV while the context is repeated behind itself, chunk by chunk."""
        replay, context = scorer.replay, self.token_ids[: self.context_len]
        highest = {(row.layer, row.head): np.zeros(len(context)) for row in self.all_rows}
        for start in range(0, len(context), replay.chunk):
            chunk = range(start, min(start + replay.chunk, len(context)))
            words = list(self._asks[0])
            if start and self._asks[1]:
                words = [*self._asks[1], *context[max(start - replay.starting, 0) : start]]
            judged = [*range(min(self.policy.keep.sinks, start)), *chunk]
            token_ids = [*words, *(context[j] for j in chunk)]
            for row, shares, hidden in self._repeat(token_ids, judged):
                paid, name = self.largest(row, judged, shares, hidden), (row.layer, row.head)
                highest[name][judged] = np.maximum(highest[name][judged], paid)
        return {
            name: {j: relative(p, 4) for j, p in enumerate(row.tolist())} for name, row in highest.items()
        }

    def largest(self, row: Row, judged: Sequence[int], shares: Array, hidden: Array) -> Array:
        """What one repeated token adds to the score of the KVs of `judged`, of what the group's heads pay them."""
        return shares.max(axis=0)

    def _repeat(self, token_ids: Sequence[int], judged: Sequence[int]) -> Iterator[tuple[Row, Array, Array]]:
        """Compute tokens behind the context, and forget them.

        Yields for each of them and each row what the heads of the group pay to the KVs of `judged`, in a softmax over
        those and the tokens computed here, and the hidden state.
        """
        model, keys, values = self._model, {}, {}
        room = np.zeros((len(token_ids), model.head_dim))
        for row in self.all_rows:
            name = row.layer, row.head
            keys[name] = np.concatenate([row.rotated[row.tokens], room])
            values[name] = np.concatenate([row.value[row.tokens], room])

        for done, token_id in enumerate(token_ids):
            position = self.computed + done
            hidden = model.embed(token_id)
            for layer, rows in enumerate(self.rows):
                q, k, v = model.project(layer, hidden)
                turned_q, turned_k = model.rotate(q, position), model.rotate(k, position)
                attended = []
                for row in rows:
                    name = row.layer, row.head
                    end = len(row.held) + done + 1
                    keys[name][end - 1], values[name][end - 1] = turned_k[row.head], v[row.head]
                    logits = turned_q[row.head] @ keys[name][:end].T / math.sqrt(model.head_dim)
                    attended.append(softmax(logits) @ values[name][:end])
                    seen = [*judged, *range(self.context_len, end)]
                    yield row, softmax(logits[:, seen])[:, : len(judged)], hidden
                after = hidden + model.join(layer, np.stack(attended))
                hidden = after + model.feed(layer, after)

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

    def _below_average(self, row: Row, history: int) -> dict[int, Score]:
        end, first, _ = self._window(row, history)
        queries = list(range(first, end)) if self.last_round < end else []
        if self.computed > self.context_len:
            queries += range(max(self.context_len, self.last_round), self.computed)
        saw, paid = row.saw[queries][:, row.tokens], row.paid[:, queries][:, :, row.tokens]
        average = 1.0 / row.saw[queries].sum(axis=1, keepdims=True)
        counts = (saw & (paid < average)).sum(axis=(0, 1)).tolist()
        closes = (saw & (abs(paid - average) <= RELATIVE * average)).sum(axis=(0, 1)).tolist()
        return {
            j: Score(-count, close, ties=not close)
            for j, count, close in zip(row.tokens, counts, closes, strict=True)
        }

    def _observed(
        self, row: Row, size: int, power: int, pool: Smoothing | None, group: Group, continual: bool
    ) -> dict[int, Score]:
        """Window scores of the context, pooled, and what later queries add."""
        end, first, tokens = self._window(row, size)
        neighbours = [j for j in tokens if not (pool and pool.skip_window and j >= first)]
        sums = self._terms(row, range(first, end), neighbours, power).sum(axis=1)

        def pooled(values: Array) -> Array:  # [..., neighbours, 2]
            if pool is None or not neighbours:
                return values
            half = pool.size // 2
            around = [values[..., max(n - half, 0) : n + half + 1, :] for n in range(len(neighbours))]
            if pool.kind == "max":
                return np.stack([each.max(axis=-2) for each in around], axis=-2)
            return np.stack([each.sum(axis=-2) / pool.size for each in around], axis=-2)

        is_pooled_first = pool is not None and pool.per_query_head
        values = aggregate(pooled(sums), group) if is_pooled_first else pooled(aggregate(sums, group))
        aggregated = dict(zip(neighbours, values, strict=True))
        later = np.zeros((len(row.held), 2))
        if continual:
            terms = self._terms(row, range(self.context_len, self.computed), row.tokens, power)
            later = aggregate(terms, group).sum(axis=0)
        return {
            j: Score(*(aggregated.get(j, np.zeros(2)) + more).tolist())
            for j, more in zip(row.tokens, later, strict=True)
        }

    def _window(self, row: Row, size: int) -> tuple[int, int, list[int]]:
        """The end and the first of the last queries before a round, and the tokens that the row held then."""
        if self.computed < self.question_end:
            return self.computed, max(self.computed - size, self._last_inner_round), row.tokens
        first = max(self.question_end - size, self._round_before_question_end)
        return self.question_end, first, row.at_question_end

    def _terms(self, row: Row, queries: range, tokens: Sequence[int], power: int) -> Array:
        """What each query head of each query adds to the KV of each token, and its error: [g, n, tokens, 2]."""
        p = row.paid[:, queries][:, :, tokens]
        return np.stack([p**power, power * RELATIVE * p**power], axis=-1)
