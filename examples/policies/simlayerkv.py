"""SimLayerKV (Zhang et al., "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction", 2024): lazy layers,
which attend to the text's start and end, keep these alone; the other layers keep all.

How much is kept follows from the model and the threshold (.9 for Llama 3, .65 for Llama 2, .8 for Mistral, .85 for
Qwen 2.5): the budget is what a lazy layer keeps, 4 + 1,024 in the paper, and memory for whole prompts must be there.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/simlayerkv.py:SIMLAYERKV --kv-budget 1028
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.eviction import EqualHeads, EvictionPolicy, Keep, LastQuery, When
from winnow.eviction.costs import Ranking, RowCosts


@dataclass(frozen=True)
class LazyLayers(EqualHeads):
    """The budget for layers whose last query pays more than `threshold` of its attention, the mean over heads, to
    protected KVs; all KVs for the others. Requires the score `LastQuery`."""

    threshold: float = 0.9

    @property
    def equal_rows(self) -> bool:
        return False

    def costs(self, ranking: Ranking) -> RowCosts:
        paid = ranking.score.masked_fill(~ranking.must_stay, 0.0).sum(
            dim=-1
        )  # the same in all heads of a layer
        return RowCosts.of(ranking, paid.transpose(0, 1)[..., None])

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        lazy = costs.cost[..., 0] > self.threshold
        return torch.where(lazy, costs.round.budget[:, None, None], costs.length)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        return 1 << 40  # as many as there are


SIMLAYERKV = EvictionPolicy(LastQuery(), LazyLayers(), Keep(sinks=4, recent=1.0), When(after_prefill=True))
