"""A signal of one's own in one file: what the context's queries ask for on average, and a score by it.

winnow run prompts.jsonl -o out.jsonl --eviction examples/own_signal.py:Mine --compression 4
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from winnow import LLM, SamplingParams
from winnow.eviction import LayerRows, Needs, Probe, Scorer, Watched


class QuerySum(Probe):
    """The sum of the context's queries by layer, [Hq, d]; forks, swap and preemption take care of it."""

    name = "query-sum"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        kept = self.kept(seen.slot)
        kept[f"{layer}"] = kept.get(f"{layer}", 0) + q.float().sum(dim=0)


@dataclass(frozen=True)
class Mine(Scorer):
    """Score a KV by the product of its key and the sum of the queries of its head's group."""

    factors: ClassVar[bool] = False  # a score may be negative

    @property
    def needs(self) -> Needs:
        return Needs(probes=(QuerySum,))

    def score(self, rows: LayerRows) -> Tensor:
        probe, keys = rows.probe(QuerySum), rows.keys()  # [sequences, heads, KVs, d]
        asked = torch.stack([probe.kept(slot)[f"{rows.layer}"] for slot in rows.round.slots])
        return (keys @ asked.unflatten(1, (keys.shape[1], -1)).sum(dim=2)[..., None])[..., 0]


if __name__ == "__main__":
    llm = LLM(kv_memory="64MiB", kv_floor=32, eviction=Mine(), compression=8)
    [output] = llm.generate("It rained all morning. " * 60, SamplingParams(temperature=0.0, max_tokens=4))
    print(output.outputs[0].text, output.outputs[0].eviction)
