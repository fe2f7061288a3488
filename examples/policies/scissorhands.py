"""Scissorhands (Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis", 2023) with its budgets
of layers: those in which tokens do not stay important get more. The preset `scissorhands` keeps as many in all layers.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/scissorhands.py:SCISSORHANDS --compression 4
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.eviction import (
    BelowAverage,
    Budget,
    EqualHeads,
    EvictionPolicy,
    Keep,
    LayerRows,
    Needs,
    Probe,
    Watched,
    When,
)
from winnow.eviction.costs import Ranking, RowCosts

EVERY = 8
"""Every eighth query of the context is kept until the round after the prompt."""


class Persistence(Probe):
    """The persistence ratio of each layer, the mean over query heads, in `kept` from the first round on."""

    name = "persistence"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        kept, some = self.kept(seen.slot), q[-seen.start % EVERY :: EVERY].float() * spec.scale
        kept[f"{layer}"] = torch.cat([kept[f"{layer}"], some]) if f"{layer}" in kept else some

    def ratio(self, rows: LayerRows, index: int) -> float:
        """Return, of the tokens of the first half that are pivotal to a query of the second, the share that was so to
        one of the first. A token is pivotal to a query that pays it more than the average of what it sees."""
        kept, name = self.kept(rows.round.slots[index]), f"{rows.layer}.ratio"
        if name not in kept:
            keys = rows.keys()[index]  # nothing is gone yet
            q = kept.pop(f"{rows.layer}").transpose(0, 1).unflatten(0, (len(keys), -1))  # [H, g, n, d]
            at = torch.arange(q.shape[2], device=q.device)[:, None] * EVERY
            place = rows.position[index, 0]
            seen, half = rows.valid[index, 0] & (place <= at), int(rows.round.tokens[index]) // 2
            p = (q @ keys[:, None].mT).masked_fill(~seen, -torch.inf).softmax(dim=-1)
            pivotal = p > 1.0 / (at + 1)
            early, late = pivotal[:, :, at[:, 0] < half].any(2), pivotal[:, :, at[:, 0] >= half].any(2)
            late = late & (place < half)
            both, number = (early & late).sum(-1), late.sum(-1)
            kept[name] = float((both / number.clamp_min(1)).mean())
        return float(kept[name])


@dataclass(frozen=True)
class Counted(BelowAverage):
    """Scissorhands' score; queries are kept for the budget."""

    @property
    def needs(self) -> Needs:
        return Needs(probes=(Persistence,))


@dataclass(frozen=True)
class ByPersistence(EqualHeads):
    """The share `equal` of the budget alike for all layers, the rest in proportion to 1 - the persistence ratio. The
    paper says which layers get more, and no amount. Requires the score `Counted`."""

    equal: float = 0.5

    @property
    def equal_rows(self) -> bool:
        return False

    def costs(self, ranking: Ranking) -> RowCosts:
        rows = ranking.rows
        assert rows.signals is not None, "rows of an engine have them"
        probe = rows.signals.probe(Persistence)
        layers = [rows.layer(i) for i in range(len(rows.layers))]
        ratio = [[probe.ratio(layer, i) for layer in layers] for i in range(len(rows.round.slots))]
        found = torch.tensor(ratio, dtype=torch.float32, device=ranking.length.device)
        return RowCosts.of(ranking, found[:, :, None, None].expand(*ranking.length.shape, 1))

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        fading = 1.0 - costs.cost[:, :, 0, 0].double()
        share = self.equal + (1.0 - self.equal) * fading / fading.mean(dim=1, keepdim=True).clamp_min(1e-9)
        return (costs.round.budget[:, None] * share).long()[..., None].expand_as(costs.length)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        return Budget.blocks_after(self, layout, budget, protected)


SCISSORHANDS = EvictionPolicy(
    Counted(), ByPersistence(), Keep(recent=10), When(after_prefill=True, decode_every=64)
)
