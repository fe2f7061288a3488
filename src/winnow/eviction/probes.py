"""PROBES: what policies see of queries, keys and values while these are computed."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.cache.layout import ceil_div
from winnow.cache.slot_states import SlotState
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.sequence import SequenceEviction
from winnow.eviction.signals import ReferenceQueries, Signals


@dataclass(frozen=True)
class Watched:
    """Consecutive tokens of one sequence in a packed batch, or some of them, evenly spaced.

    Attributes:
        eviction: how the sequence is evicted from, a `SequenceEviction`.
        tokens: their places in the batch.
        start: index of the first one in its sequence; for a replay, counted on behind the context.
        replay: number of the pass that repeats the context; None: they are tokens of the sequence itself.
    """

    slot: int
    eviction: Any
    tokens: slice
    start: int
    replay: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.tokens.stop - self.tokens.start


class Probe(SlotState):
    """What a policy keeps of the tokens that it watches: one object for all sequences of an engine.

    A score names its probes in `needs`, and asks them in a round by `LayerRows.probe`. By default a probe is shown the
    tokens of the context, each once, in chunks. What it learns of a sequence lies under names in `kept`: tensors, which
    are replaced and never changed, and values. Forks, swap and preemption take care of them.

    Attributes:
        evictable_only: it is shown only layers that policies evict from.
    """

    evictable_only: ClassVar[bool] = False

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self._sequences: dict[int, dict[str, Any]] = {}

    @abstractmethod
    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        """Look at watched tokens: q [n, Hq, d], k and v [n, H, d], rotated at their positions; views of the batch."""

    def watch(self, seen: Watched) -> Watched | None:
        """Return which of a step's tokens of a sequence are shown; None: none. Called once a step, before `at`."""
        if seen.replay is not None:  # the queries of a repetition are not the context's
            return None
        if seen.start == 0:
            self._sequences[seen.slot] = {}
        if seen.start < seen.eviction.context_len:
            return seen
        if not seen.eviction.policy.when.in_decode:
            self.close(seen.slot)  # no round will ask any more
        return None

    def end_round(self, slot: int) -> None:
        """Handle the end of a round of a sequence."""

    def kept(self, slot: int) -> dict[str, Any]:
        return self._sequences.setdefault(slot, {})

    def nbytes(self, slot: int) -> int:
        return sum(each.nbytes for each in self._sequences.get(slot, {}).values() if isinstance(each, Tensor))

    def fork(self, slot: int, to: int) -> None:
        if slot in self._sequences:
            self._sequences[to] = dict(self._sequences[slot])

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> dict[str, Any] | None:
        return _on(torch.device("cpu"), self._sequences[slot]) if slot in self._sequences else None

    def load(self, slot: int, saved: dict[str, Any]) -> None:
        self._sequences[slot] = _on(self.signals.device, saved)

    def close(self, slot: int) -> None:
        self._sequences.pop(slot, None)


def _on(device: torch.device, kept: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each.to(device, copy=True) if isinstance(each, Tensor) else each for name, each in kept.items()
    }


class ReferenceProbe(Probe):
    """Queries to which a policy fits what it keeps: of a replay, at about `Fit.most_queries` positions."""

    name = "references"
    evictable_only = True

    def watch(self, seen: Watched) -> Watched | None:
        eviction: SequenceEviction = seen.eviction
        fit, since = eviction.policy.compact, eviction.context_len
        assert fit is not None, "the policy fits what it keeps"
        if seen.replay is None:
            if seen.start >= since:
                self.close(seen.slot)  # no round will ask any more
            return None
        every = ceil_div(sum(each.length for each in eviction.passes), fit.most_queries)
        start = seen.start + -(seen.start - since) % every
        if start >= seen.end:
            return None
        kept, part = self.kept(seen.slot), seen.replay
        if start == since:  # computed from its beginning
            for name in [name for name in kept if name.startswith(f"{part}.")]:
                del kept[name]
        tokens = slice(seen.tokens.start + start - seen.start, seen.tokens.stop, every)
        kept[f"{part}.positions"] = (*kept.get(f"{part}.positions", ()), *range(start, seen.end, every))
        return replace(seen, tokens=tokens, start=start)

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        kept, name = self.kept(seen.slot), f"{seen.replay}.{layer}"
        kept[f"spec.{layer}"] = spec
        # The batch's own memory is much larger.
        kept[name] = torch.cat([kept[name], q]) if name in kept else q.clone()

    def end_round(self, slot: int) -> None:
        self.close(slot)

    def of(self, layer: int, slot: int) -> ReferenceQueries | None:
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
