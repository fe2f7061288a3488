"""FastGen (Ge et al., "Model Tells You What to Discard", 2024): each head keeps the smallest of five sets of KVs that
recovers its attention to the prompt.

How much is kept follows from the heads and the threshold alone, so that there is no amount to ask for; memory for
whole prompts must be there.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/fastgen.py:FASTGEN
"""

import string
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.eviction import Budget, Cumulative, EvictionPolicy, Keep, LayerRows, Needs, Probe, Watched, When
from winnow.eviction.costs import Ranking, RowCosts

SPECIAL, PUNCTUATION = 1, 2  # kinds of tokens; 0 is any other


class TokenKinds(Probe):
    """The kind of each token of the vocabulary."""

    name = "token-kinds"

    def watch(self, seen: Watched) -> None:
        return None

    def at(self, *_: Any) -> None:
        raise AssertionError("nothing is shown")

    @cached_property
    def table(self) -> Tensor:
        tokenizer, kinds = self.signals.model.tokenizer, torch.zeros(self.signals.model.vocab_size).byte()
        for token in range(0 if tokenizer is None else len(kinds)):
            text = tokenizer.decode([token]).strip()
            kinds[token] = PUNCTUATION if text and set(text) <= set(string.punctuation) else 0
        for token in () if tokenizer is None else tokenizer.all_special_ids:
            kinds[token] = SPECIAL
        return kinds.to(self.signals.device)

    def of(self, rows: LayerRows) -> Tensor:
        """Return the kind of each KV's token, [B, H, N]; arbitrary past the length."""
        found = [
            torch.tensor(self.signals.token_ids(slot)).to(self.signals.device) for slot in rows.round.slots
        ]
        place = [rows.position[i].long().clamp(0, len(each) - 1) for i, each in enumerate(found)]
        return torch.stack([self.table[each[at]] for each, at in zip(found, place, strict=True)])


@dataclass(frozen=True)
class Recipes(Cumulative):
    """The sum of attention, and `CHOSEN` more for the KVs of the head's recipe.

    Recipes, each with the one before: protected KVs and special tokens; punctuation; the `heavy` share of KVs with most
    attention; the `local` share of tokens nearest to the end; all KVs. A head takes the first that holds the share
    `recovery` of its attention.
    """

    recovery: float = 0.9
    heavy: float = 0.3
    local: float = 0.3

    @property
    def needs(self) -> Needs:
        return Needs(probes=(TokenKinds,))

    def score(self, rows: LayerRows) -> Tensor:
        mass, kind = rows.accumulators[0].masked_fill(~rows.valid, 0.0), rows.probe(TokenKinds).of(rows)
        chosen, found = rows.valid, torch.zeros_like(rows.valid[..., :1])
        kept = rows.protected
        best = mass.masked_fill(~rows.valid, -1.0).flip(-1).argsort(dim=-1, descending=True, stable=True)
        place = best.argsort(dim=-1).flip(-1)  # of equals the newer stays
        for more in (
            kind == SPECIAL,
            kind == PUNCTUATION,
            place < (rows.length.float() * self.heavy).long()[..., None],
            rows.age() < (rows.round.tokens.float() * self.local).long()[:, None, None],
        ):
            kept = kept | (more & rows.valid)
            recovers = (mass * kept).sum(-1, keepdim=True) >= self.recovery * mass.sum(-1, keepdim=True)
            chosen = torch.where(recovers & ~found, kept, chosen)
            found = found | recovers
        return mass + CHOSEN * chosen


CHOSEN = 2.0**16
"""Above any sum of attention."""


@dataclass(frozen=True)
class OfRecipes(Budget):
    """Keep what each head's recipe selects; the request's budget is not used. Requires the score `Recipes`."""

    @property
    def fixed(self) -> int:
        return 1  # a head whose attention one special token recovers keeps one KV

    def costs(self, ranking: Ranking) -> RowCosts:
        chosen = (ranking.score >= CHOSEN) & ranking.rows.valid
        return RowCosts.of(ranking, chosen.sum(dim=-1).float().transpose(0, 1)[..., None])

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        return costs.cost[..., 0].long()

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        return 1 << 40  # as many as there are


FASTGEN = EvictionPolicy(Recipes(), OfRecipes(), Keep(sinks=1), When(after_prefill=True))
