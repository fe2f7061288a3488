"""How many KVs each row keeps, by the definition of each budget."""

import math
from fractions import Fraction
from typing import Any

from dense_model import floor_share
from dense_scores import DenseScores
from dense_state import Order, Row, Score

from winnow.eviction import AdaptiveHeads, AdaptiveRows, EqualHeads, Pyramid


class DenseBudgets(DenseScores):
    """The budgets' formulas."""

    def _keeps(self, scores: dict[tuple[int, int], dict[int, Score]]) -> list[int]:
        """What each row keeps, in the order of `all_rows`; not yet raised to what is protected."""
        budget = self.policy.budget
        if isinstance(budget, AdaptiveRows):
            return self._cheapest_blocks(scores)
        assert isinstance(budget, EqualHeads | AdaptiveHeads)
        shares = self._raised(self._layer_shares(budget.layers))
        if isinstance(budget, AdaptiveHeads):
            return [
                keep
                for layer, share in zip(self.rows, shares, strict=True)
                for keep in self._compete(layer, share, budget.floor, scores)
            ]
        return [shares[row.layer] for row in self.all_rows]

    def _floor(self, floor: float) -> int:
        """A floor in KVs."""
        return floor_share(floor, self.target) if isinstance(floor, float) else min(floor, self.target)

    def _layer_least(self, layer: int) -> int:
        """What each row of a layer must be able to keep."""
        budget = self.policy.budget
        protected = max(self._num_protected(row) for row in self.rows[layer])
        return max(self._floor(budget.row_floor), self._floor(budget.layer_floor), protected)

    def _least(self, row: Row) -> int:
        """What a row keeps at least."""
        return min(self._floor(self.policy.budget.row_floor), len(row.held))

    def _raised(self, shares: list[int]) -> list[int]:
        """Shares of layers, none below its floor; the others pay in proportion to what they have above theirs."""
        budget = self.policy.budget
        if not (budget.row_floor or budget.layer_floor):
            return shares
        least = [self._layer_least(layer) for layer in range(len(shares))]
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
        return [c] * num_layers

    def _compete(
        self, layer: list[Row], share: int, floor: float, scores: dict[tuple[int, int], dict[int, Score]]
    ) -> list[int]:
        """AdaptiveHeads."""
        protected = [self._num_protected(row) for row in layer]
        b = [max(share - p, 0) for p in protected]
        free = [self._free(row, scores[row.layer, row.head]) for row in layer]
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
            keeps.append(round(n * (1 - Fraction(str(floor))) + floor_share(floor, own)) + p)
        return keeps

    def _cheapest_blocks(self, scores: dict[tuple[int, int], dict[int, Score]]) -> list[int]:
        """AdaptiveRows."""
        b = self._block_size
        allowed = math.ceil(Fraction(self.target * len(self.all_rows), b))
        excess = sum(math.ceil(len(row.held) / b) for row in self.all_rows) - allowed
        steps: dict[tuple[int, int], list[int]] = {}
        candidates: list[tuple[Score, Order, Any]] = []
        for row in self.all_rows:
            ranked = sorted(
                self._free(row, scores[row.layer, row.head]), key=lambda entry: (entry[0].value, entry[1])
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
        return bool(budget.row_floor or budget.layer_floor)

    def _within_layers(self, candidates: list[tuple[Score, Order, Any]]) -> list[tuple[Score, Order, Any]]:
        """Of blocks that could go, those that each layer can spare."""
        spared = []
        for layer, rows in enumerate(self.rows):
            floor = self._floor(self.policy.budget.layer_floor) * len(rows)
            held = sum(math.ceil(len(row.held) / self._block_size) for row in rows)
            own = [candidate for candidate in candidates if candidate[1][0] == layer]
            named = [(score, order, (score, order, name)) for score, order, name in own]
            spared += self._lowest(named, held - math.ceil(floor / self._block_size))
        return spared
