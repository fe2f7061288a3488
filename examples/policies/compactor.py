"""Compactor (Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage
Scores", 2025): unusual keys, and attention within chunks of the context.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/compactor.py:COMPACTOR --compression 4
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from winnow.eviction import (
    AdaptiveHeads,
    EvictionPolicy,
    Keep,
    LayerRows,
    Needs,
    Probe,
    Scorer,
    Watched,
    When,
)

CHUNK, SINKS = 256, 8


class ChunkAttention(Probe):
    """Attention, not causal, that each token receives within its chunk of `CHUNK` tokens behind `SINKS`, from unscaled
    logits: summed over queries, the mean over the group, [H, tokens] by layer."""

    name = "chunk-attention"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        kept, end, skip = self.kept(seen.slot), seen.end, max(SINKS - seen.start, 0)
        q, k = q[skip:].float(), k[skip:].float()
        if f"{layer}.q" in kept:
            q, k = torch.cat([kept[f"{layer}.q"], q]), torch.cat([kept[f"{layer}.k"], k])
        done = kept.get(f"{layer}", k.new_zeros(k.shape[1], SINKS))
        while len(q) >= CHUNK or (len(q) and end >= seen.eviction.context_len):
            heads, keys = q[:CHUNK].transpose(0, 1).unflatten(0, (k.shape[1], -1)), k[:CHUNK].transpose(0, 1)
            done = torch.cat([done, (heads @ keys[:, None].mT).softmax(-1).sum(2).mean(1)], dim=1)
            q, k = q[CHUNK:], k[CHUNK:]
        kept |= {f"{layer}": done, f"{layer}.q": q.clone(), f"{layer}.k": k.clone()}


@dataclass(frozen=True)
class Blend(Scorer):
    """w z(leverage of keys before rotation) + z(attention within chunks times the norm of the value, averaged over 3
    neighbours): z subtracts the mean over the layer's KVs that are not protected and divides by their deviation; w is
    the share of KVs that go. Leverage is of keys less their mean after a random projection to `sketch` dimensions."""

    factors: ClassVar[bool] = False
    sketch: int = 48
    ridge: float = 0.01

    @property
    def needs(self) -> Needs:
        return Needs(probes=(ChunkAttention,), rotation=True)

    def score(self, rows: LayerRows) -> Tensor:
        keys, counted, probe = rows.unrotated_keys(), rows.valid & ~rows.protected, rows.probe(ChunkAttention)
        place = [rows.position[i].long().masked_fill(~rows.valid[i], 0) for i in range(len(keys))]
        received = [probe.kept(slot)[f"{rows.layer}"] for slot in rows.round.slots]
        attention = torch.stack([each.gather(1, at) for each, at in zip(received, place, strict=True)])
        weighed = (attention * rows.values().norm(dim=-1)).masked_fill(~counted, 0.0)
        generator = torch.Generator().manual_seed(rows.layer)
        projection = torch.randn(keys.shape[-1], self.sketch, generator=generator).to(keys.device)
        weight, number = counted[..., None].float(), counted.sum(-1).clamp_min(1)[..., None, None]
        x = (keys - (keys * weight).sum(2, keepdim=True) / number) * weight @ projection / self.sketch**0.5
        gram = x.mT @ x
        gram += (
            self.ridge
            * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            * torch.eye(self.sketch).to(gram)
        )
        leverage = (torch.linalg.solve(gram, x.mT).mT * x).sum(-1)
        share = 1.0 - rows.round.budget / rows.round.tokens
        blend = share[:, None, None] * _standard(leverage, counted)
        return blend + _standard(avg_pool1d(pad(weighed, (1, 1)), 3, 1), counted)


def _standard(x: Tensor, counted: Tensor) -> Tensor:
    return torch.stack(
        [(a - a[b].mean()) / a[b].std().clamp_min(1e-6) for a, b in zip(x, counted, strict=True)]
    )


COMPACTOR = EvictionPolicy(Blend(), AdaptiveHeads(), Keep(sinks=SINKS, recent=4), When(after_prefill=True))
