r"""SqueezeAttention (Wang and Gan, "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal
Budget", 2024) over H2O: layers whose attention changes the hidden state little keep a part of the budget.

Hidden states are read by hooks of transformers' own layers, which `optimize=False` leaves in place.

winnow run prompts.jsonl -o out.jsonl --no-optimize --compression 4 \
    --eviction examples/policies/squeezeattention.py:SQUEEZE
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from winnow.cache import CacheLayout
from winnow.errors import UnsupportedModelError
from winnow.eviction import (
    Budget,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    Keep,
    Needs,
    Probe,
    Signals,
    Watched,
    When,
)
from winnow.eviction.costs import Ranking, RowCosts


class Similarity(Probe):
    """Cosine of the hidden state before and after a layer's attention, summed over the context: `kept` by layer."""

    name = "similarity"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        self._before: Tensor | None = None
        self._seen: list[tuple[int, Watched]] = []
        hooked = 0
        for layer in signals.model.model.modules():
            if isinstance(attention := getattr(layer, "self_attn", None), torch.nn.Module):
                layer.register_forward_pre_hook(self._enter, with_kwargs=True)
                attention.register_forward_hook(self._leave)
                hooked += 1
        if signals.model.decoder is not None or hooked != signals.model.geometry.num_layers:
            raise UnsupportedModelError(
                "hidden states are hooked in transformers' own layers: optimize must be False"
            )

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before = (args[0] if args else kwargs["hidden_states"])[0]

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        self._seen.append((layer, seen))

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        added = (output[0] if isinstance(output, tuple) else output)[0]
        for layer, seen in self._seen:
            assert self._before is not None, "the layer was entered"
            before, kept = self._before[seen.tokens].float(), self.kept(seen.slot)
            cosines = F.cosine_similarity(before, before + added[seen.tokens].float(), dim=-1)
            kept[f"{layer}"] = kept.get(f"{layer}", 0.0) + cosines.sum()
        self._seen.clear()


@dataclass(frozen=True)
class Watching(Cumulative):
    """H2O's score; layers are watched for the budget."""

    @property
    def needs(self) -> Needs:
        return Needs(probes=(Similarity,))


@dataclass(frozen=True)
class LayerGroups(EqualHeads):
    """`share` of the budget for each layer of the group whose hidden states stay most alike, of three groups that
    3-means finds; what they give up is divided among the other layers. Requires the score `Watching`."""

    share: float = 0.38

    @property
    def equal_rows(self) -> bool:
        return False

    def costs(self, ranking: Ranking) -> RowCosts:
        rows = ranking.rows
        assert rows.signals is not None, "rows of an engine have them"
        probe = rows.signals.probe(Similarity)
        sums = [[probe.kept(slot)[f"{layer}"] for layer in rows.layers] for slot in rows.round.slots]
        similarity = torch.tensor(sums, device=ranking.length.device) / rows.round.tokens[:, None]
        return RowCosts.of(ranking, similarity[:, :, None, None].expand(*ranking.length.shape, 1))

    def allot(self, costs: RowCosts) -> Tensor:
        assert costs.cost is not None, "set by `costs`"
        alike = torch.stack([most_alike(each) for each in costs.cost[:, :, 0, 0].double()])
        budget, poor = costs.round.budget, (costs.round.budget.double() * self.share).long()
        count = alike.sum(dim=1)
        rich = (budget * costs.num_layers - count * poor) // (costs.num_layers - count).clamp_min(1)
        return torch.where(alike, poor[:, None], rich[:, None])[..., None].expand_as(costs.length)

    def blocks_after(self, layout: CacheLayout, budget: int, protected: int) -> int:
        return Budget.blocks_after(self, layout, budget, protected)


def most_alike(values: Tensor) -> Tensor:
    """Mark the highest of three groups of `values`, [L]. In one dimension groups are runs of the sorted values, so that
    trying all splits finds the best without a seed. Of fewer than three none is marked."""
    ordered = values.sort().values.tolist()

    def spread(part: list[float]) -> float:
        return sum((x - sum(part) / len(part)) ** 2 for x in part)

    ends = combinations(range(1, len(ordered)), 2)
    splits = [(spread(ordered[:i]) + spread(ordered[i:j]) + spread(ordered[j:]), j) for i, j in ends]
    return values >= ordered[min(splits)[1]] if splits else values > torch.inf


SQUEEZE = EvictionPolicy(
    Watching(), LayerGroups(), Keep(recent=0.5), When(after_prefill=True, decode_every=1)
)
