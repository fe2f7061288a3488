r"""KVzip+ (Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", 2026, as in kvpress): KVzip's
attention of a replay, times what the value adds to the hidden state, over the norm of what the query was computed from.

Hidden states are read by hooks of transformers' own layers, which `optimize=False` leaves in place.

winnow run prompts.jsonl -o out.jsonl --no-optimize --compression 4 \
    --eviction examples/policies/kvzip_plus.py:KVZIP_PLUS
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.errors import UnsupportedModelError
from winnow.eviction import (
    AdaptiveRows,
    EvictionPolicy,
    Keep,
    LayerRows,
    Needs,
    Probe,
    Reconstruction,
    Signals,
    Watched,
    When,
)


class Repetition(Probe):
    """Keep scaled queries, keys and norms of hidden states of the replay's tokens, by pass and layer."""

    name = "repetition"

    def __init__(self, signals: Signals) -> None:
        super().__init__(signals)
        modules = (getattr(each, "self_attn", None) for each in signals.model.model.modules())
        self.attention: list[Any] = [each for each in modules if isinstance(each, torch.nn.Module)]
        for each in self.attention:
            each.register_forward_pre_hook(self._enter, with_kwargs=True)
        if signals.model.decoder is not None or len(self.attention) != signals.model.geometry.num_layers:
            raise UnsupportedModelError(
                "hidden states are hooked in transformers' own layers: optimize must be False"
            )

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._norms = (args[0] if args else kwargs["hidden_states"])[0].float().norm(dim=-1)

    def watch(self, seen: Watched) -> Watched | None:
        return seen if seen.replay is not None else super().watch(seen) and None

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> None:
        kept, goes_on = self.kept(seen.slot), seen.start > seen.eviction.context_len
        for part, new in (("q", q.float() * spec.scale), ("k", k.float()), ("h", self._norms[seen.tokens])):
            name = f"{seen.replay}.{layer}.{part}"
            kept[name] = torch.cat([kept[name], new]) if goes_on else new.clone()
        kept["passes"] = seen.eviction.passes

    def end_round(self, slot: int) -> None:
        self.close(slot)

    def added(self, layer: int, values: Tensor) -> Tensor:
        """|W_o v| of each query head for values, [H, N, d]: [H, g, N]."""
        project = self.attention[layer].o_proj
        size = values.shape[0], -1, values.shape[-1]
        dtype = next(self.signals.model.model.parameters()).dtype
        unit = torch.eye(project.in_features, dtype=dtype, device=values.device)
        weight = (project(unit) - project(torch.zeros_like(unit[:1]))).float().unflatten(0, size)
        return (values[:, None] @ weight).norm(dim=-1)


@dataclass(frozen=True)
class Plus(Reconstruction):
    """The largest share |W_o v| / |h| over the replay's queries and the heads of the group."""

    @property
    def needs(self) -> Needs:
        return Needs(probes=(Repetition,))

    def score(self, rows: LayerRows) -> Tensor:
        probe, keys, values = rows.probe(Repetition), rows.keys(), rows.values()
        scores = torch.zeros_like(rows.position, dtype=torch.float32)
        for i, (slot, at) in enumerate(zip(rows.round.slots, rows.position, strict=True)):
            kept, added = probe.kept(slot), probe.added(rows.layer, values[i])
            for number, each in enumerate(kept["passes"]):
                q, k, h = (kept[f"{number}.{rows.layer}.{part}"] for part in "qkh")
                judged = rows.valid[i] & ((at < each.head) | (at >= each.start) & (at < each.end))
                heads = q.transpose(0, 1).unflatten(0, (len(at), -1))  # [H, g, n, d]
                to_context = (heads @ keys[i, :, None].mT).masked_fill(~judged[:, None, None], -torch.inf)
                later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
                to_pass = (heads @ k.transpose(0, 1)[:, None].mT).masked_fill(later, -torch.inf)
                shares = torch.cat([to_context, to_pass], dim=-1).softmax(-1)[..., : at.shape[1]]
                scores[i] = scores[i].maximum(((shares / h[:, None]).amax(2) * added).amax(1))
        return scores


KVZIP_PLUS = EvictionPolicy(Plus(), AdaptiveRows(), Keep(sinks=4), When(after_prefill=True))
