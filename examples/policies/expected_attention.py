"""Expected Attention (Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future
Queries Distribution", 2025): the context's queries say what later ones will ask for.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/expected_attention.py:EXPECTED --compression 4
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.eviction import (
    AdaptiveHeads,
    ByValueNorm,
    EvictionPolicy,
    Keep,
    LayerRows,
    Needs,
    Probe,
    Scorer,
    Watched,
    When,
)

SKIP = 4
"""First positions, whose queries are outliers, and whose keys get the layer's largest share."""


class QueryMoments(Probe):
    """Sums of the context's queries before rotation, and of their outer products, in float64: d (d + 1) numbers for
    each query head."""

    name = "query-moments"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        skip = max(SKIP - seen.start, 0)
        first, q = seen.start + skip, q[skip:].float()
        back = -torch.arange(first, first + len(q), device=q.device)[:, None].expand(q.shape[:2])
        heads = (self.signals.turn(layer, q, back) * spec.scale).double().transpose(0, 1)  # [Hq, n, d]
        kept, ones = self.kept(seen.slot), heads.new_ones(len(heads), heads.shape[1], 1)
        heads = torch.cat([heads, ones], dim=-1)  # the last row of the product is their sum and number
        kept[f"{layer}"] = kept.get(f"{layer}", 0.0) + heads.mT @ heads


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """The softmax over the row of m^T k + k^T S k / 2, the mean over the group: m and S are the mean and covariance of
    the queries, rotated by the mean of the rotations to the next `horizon` positions, with the model's factor."""

    horizon: int = 512

    @property
    def needs(self) -> Needs:
        return Needs(probes=(QueryMoments,), rotation=True)

    def score(self, rows: LayerRows) -> Tensor:
        probe, keys = rows.probe(QueryMoments), rows.keys()
        counted = rows.valid & (rows.position >= SKIP)
        unit, shares = torch.eye(keys.shape[-1], device=keys.device).repeat(self.horizon, 1, 1), []
        for i, slot in enumerate(rows.round.slots):
            ahead = int(rows.round.tokens[i]) + torch.arange(self.horizon, device=keys.device)
            turn = probe.signals.turn(rows.layer, unit, ahead[:, None].expand(unit.shape[:2])).mean(dim=0).T
            sums = probe.kept(slot)[f"{rows.layer}"].unflatten(0, (keys.shape[1], -1))  # [H, g, d + 1, d + 1]
            mean = sums[..., -1, :-1] / sums[..., -1:, -1]
            spread = sums[..., :-1, :-1] / sums[..., -1:, -1:] - mean[..., None] * mean[..., None, :]
            m, s = mean.float() @ turn.T, turn @ spread.float() @ turn.T
            logits = (keys[i, :, None] @ m[..., None])[..., 0] + (
                (keys[i, :, None] @ s) * keys[i, :, None]
            ).sum(-1) / 2
            shares.append(logits.masked_fill(~counted[i, :, None], -torch.inf).softmax(dim=-1).mean(dim=1))
        share = torch.stack(shares)
        return torch.where(counted, share, share.amax(dim=(1, 2), keepdim=True))


EXPECTED = EvictionPolicy(
    ByValueNorm(ExpectedAttention(), 0.01), AdaptiveHeads(), Keep(sinks=4), When(after_prefill=True)
)
