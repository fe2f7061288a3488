"""DropKV (kvpress, request 284): what the last queries' outputs would lose with a KV, under KV-Compress's budget.

winnow run prompts.jsonl -o out.jsonl --eviction examples/policies/dropkv.py:DROPKV --compression 4
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, LayerRows, Needs, Probe, Scorer, Watched, When

WINDOW = 32


class LastQueries(Probe):
    """The queries of the context's last `WINDOW` tokens, rotated and scaled, [n, Hq, d] by layer."""

    name = "last-queries"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        kept, name = self.kept(seen.slot), f"{layer}"
        q = q.float() * spec.scale
        kept[name] = (torch.cat([kept[name], q]) if name in kept else q)[-WINDOW:].clone()


@dataclass(frozen=True)
class OutputLoss(Scorer):
    """(p / (1 - p))^2 |v - o|^2, summed over the context's last queries and the heads of the group: o is a head's
    output, and what is added is the square of its change without the KV."""

    @property
    def needs(self) -> Needs:
        return Needs(probes=(LastQueries,))

    def score(self, rows: LayerRows) -> Tensor:
        keys, values, scores = rows.keys(), rows.values(), []
        for i, slot in enumerate(rows.round.slots):
            q = rows.probe(LastQueries).kept(slot)[f"{rows.layer}"].transpose(0, 1)  # [Hq, n, d]
            q = q.unflatten(0, (keys.shape[1], -1))  # [H, g, n, d]
            end = int(rows.round.tokens[i])
            now = torch.arange(end - q.shape[2], end, device=q.device)[:, None]
            seen = rows.valid[i, :, None] & (rows.position[i, :, None] <= now)  # [H, n, N]
            p = (q @ keys[i, :, None].mT).masked_fill(~seen[:, None], -torch.inf).softmax(dim=-1)
            v = values[i, :, None]
            out = p @ v
            # |v - o|^2, without a tensor of all pairs
            far = v.square().sum(-1)[:, :, None] - 2 * out @ v.mT + out.square().sum(-1, keepdim=True)
            scores.append(((p / (1 - p).clamp_min(1e-4)).square() * far.clamp_min(0.0)).sum(dim=(1, 2)))
        return torch.stack(scores)


DROPKV = EvictionPolicy(OutputLoss(), AdaptiveRows(), Keep(recent=WINDOW), When(after_prefill=True))
