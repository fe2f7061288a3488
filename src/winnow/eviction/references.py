"""Queries to which policies fit what they keep, remembered from when they are computed until the round."""

from dataclasses import replace

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.cache.layout import ceil_div
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.sequence import SequenceEviction
from winnow.eviction.signals import ReferenceQueries


class ReferenceProbe(Probe):
    """Queries to which a policy fits what it keeps: of a replay, at about `Fit.most_queries` positions."""

    name = "references"
    evictable_only = True

    def watch(self, seen: Watched) -> Watched | None:
        some = _referred(seen)
        if some is None:
            if seen.replay is None and seen.start >= seen.eviction.context_len:
                self.close(seen.slot)  # no round will ask any more
            return None
        kept, part = self.kept(seen.slot), seen.replay or 0
        if some[1]:  # computed from its beginning
            for name in [name for name in kept if name.startswith(f"{part}.")]:
                del kept[name]
        tokens = some[0].tokens
        span = range(0, tokens.stop - tokens.start, tokens.step)
        kept[f"{part}.positions"] = (*kept.get(f"{part}.positions", ()), *(some[0].start + at for at in span))
        return some[0]

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        kept, name = self.kept(seen.slot), f"{seen.replay or 0}.{layer}"
        kept[f"spec.{layer}"] = spec
        # The batch's own memory is much larger.
        kept[name] = torch.cat([kept[name], q]) if name in kept else q.clone()

    def end_round(self, slot: int) -> None:
        self.close(slot)

    def of(self, layer: int, slot: int) -> ReferenceQueries | None:
        """Return the queries of a layer; None: there are none."""
        kept = self._sequences.get(slot, {})
        parts = [name.partition(".")[0] for name in kept if name.endswith(".positions")]
        parts = [part for part in parts if f"{part}.{layer}" in kept]
        if not parts:
            return None
        position = [at for part in parts for at in kept[f"{part}.positions"]]
        return ReferenceQueries(
            torch.cat([kept[f"{part}.{layer}"] for part in parts]),
            torch.tensor(position, device=self.signals.device),
            kept[f"spec.{layer}"],
        )


def probes_of(policy: EvictionPolicy) -> tuple[type[Probe], ...]:
    own: tuple[type[Probe], ...] = policy.score.needs.probes
    return own if policy.compact is None else (*own, ReferenceProbe)


def _referred(seen: Watched) -> tuple[Watched, bool] | None:
    """Return which of a sequence's tokens are remembered, and whether they are the first of their part; None: none."""
    eviction: SequenceEviction = seen.eviction
    start, end = seen.start, seen.end
    fit = eviction.policy.compact
    assert fit is not None, "the policy fits what it keeps"
    if seen.replay is None:
        return None
    every = ceil_div(sum(each.length for each in eviction.passes), fit.most_queries)
    since = eviction.context_len
    start += -(start - since) % every
    if start >= end:
        return None
    tokens = slice(seen.tokens.start + start - seen.start, seen.tokens.stop, every)
    return replace(seen, tokens=tokens, start=start), start == since
