"""RoCo (Ren and Zhu, "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model
Inference", 2024, EasyKV): among KVs whose attention is steady those of the lowest mean go.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/roco.py:ROCO --compression 4
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.attention import AttentionObserver, Group, Term
from winnow.eviction import EqualHeads, EvictionPolicy, Keep, LayerRows, Scorer, When


@dataclass(frozen=True)
class MeanDeviation(Scorer):
    """Mean attention since a KV is there, where the candidates are the KVs whose attention deviates least: as many as
    the budget keeps, or as must go if that is more. Every other KV outranks them.

    Mean and deviation are over the queries that saw the KV and the heads of its group. EasyKV, which has one head a
    group, squares the group's mean instead.
    """

    factors: ClassVar[bool] = False
    num_accumulators: ClassVar[int] = 2

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((Term.ATTENTION, Term.SQUARED), Group.MEAN)

    def score(self, rows: LayerRows) -> Tensor:
        seen = (rows.age() + 1).clamp_min(1)
        mean = rows.accumulators[0] / seen
        deviation = (rows.accumulators[1] / seen - mean.square()).clamp_min(0.0).sqrt()
        free, budget = rows.valid & ~rows.protected, rows.round.budget[:, None]
        count = torch.maximum(budget - rows.protected.sum(dim=-1), rows.length - budget)
        place = deviation.masked_fill(~free, torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
        return torch.where(place < count[..., None], mean, mean + 2.0)  # no mean is above 1


ROCO = EvictionPolicy(
    MeanDeviation(),
    EqualHeads(),
    Keep(sinks=4, recent=0.1),
    When(after_prefill=True, prefill_every=256, decode_every=1),
)
