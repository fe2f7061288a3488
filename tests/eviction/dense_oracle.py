"""Rules of docs/eviction-rules.md, done slowly: one sequence, one token at a time, all attention weights remembered.

No cache, no blocks, no accumulators. A row is a list of KVs. Whenever a round falls, the score of a KV is computed
anew from all the attention that it was ever paid. Float64; a choice that float32 could make otherwise is noted.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from dense_budgets import DenseBudgets
from dense_state import Kv, Row


class DenseSequence(DenseBudgets):
    """A prompt and its answer under a policy."""

    # -- computing -------------------------------------------------------------------------------------------------

    def advance(self, token_ids: Sequence[int], to: int) -> None:
        """Compute the tokens before index `to`, with the rounds that the policy alone asks for."""
        while self.computed < to:
            if self.is_due():
                self.shrink()
            self._compute(token_ids[self.computed])

    def _compute(self, token_id: int) -> None:
        token, model = self.computed, self._model
        hidden = model.embed(token_id)
        for layer, rows in enumerate(self.rows):
            q, k, v = model.project(layer, hidden)
            turned_q, turned_k = model.rotate(q, token), model.rotate(k, token)
            for row in rows:
                row.held.append(Kv(token, token))
                row.key[token], row.value[token] = k[row.head], v[row.head]
                row.rotated[token] = row.fresh[token] = turned_k[row.head]
                self._take_stored(row, row.held[-1])
                row.query[token], row.rotated_query[token] = q[row.head], turned_q[row.head]
            attended = np.stack([row.attend(token, turned_q[row.head]) for row in rows])
            after = hidden + model.join(layer, attended)
            hidden = after + model.feed(layer, after)
        self.logprobs.append(model.logprobs(hidden))
        self.token_ids.append(token_id)
        self.computed += 1
        if self.computed == self.question_end:
            self._round_before_question_end = self._last_inner_round
            for row in self.all_rows:
                row.at_question_end = row.tokens

    def _take_stored(self, row: Row, kv: Kv) -> None:
        """Continue with what a codec that rounds coarsely has left of a KV, if `stored` says it."""
        if self.stored is not None:
            k, v = self.stored(row, kv.position, row.rotated[kv.token], row.value[kv.token])
            row.rotated[kv.token], row.value[kv.token] = k, v
            row.key[kv.token] = self._model.rotate(k, -kv.position)

    # -- when ------------------------------------------------------------------------------------------------------

    def holds_too_much(self) -> bool:
        """Whether a round now would be one: rows hold more than it leaves, and tokens came since the last."""
        return self._mean() > self.target and self.computed != self.last_round

    def _mean(self) -> Fraction:
        return Fraction(sum(len(row.held) for row in self.all_rows), len(self.all_rows))

    def is_due(self) -> bool:
        """Whether the policy alone asks for a round before the next token."""
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
        self.last_round = self.computed
        if self.computed < self.context_len:
            self._last_inner_round = self.computed
        self.num_rounds += 1

    def _choose(self) -> list[tuple[Row, set[int]]]:
        """The KVs that go, by token."""
        scores = {(row.layer, row.head): self.scores(row) for row in self.all_rows}
        chosen = []
        for row, keep in zip(self.all_rows, self._keeps(scores), strict=True):
            free = self._free(row, scores[row.layer, row.head])
            keep = max(keep, len(row.held) - len(free))
            chosen.append((row, set(self._lowest(free, len(row.held) - keep))))
        return chosen
