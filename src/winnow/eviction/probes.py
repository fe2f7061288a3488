"""PROBES: what policies see of queries, keys and values while these are computed."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.cache.slot_states import SlotState
from winnow.eviction.signals import Needs, QueryMoments, Signals


@dataclass(frozen=True)
class Watched:
    """Consecutive tokens of one sequence in a packed batch, or some of them, evenly spaced.

    Attributes:
        eviction: how the sequence is evicted from, a `SequenceEviction`.
        tokens: their places in the batch.
        start: index of the first one in its sequence; for a replay, counted on behind the context.
        position: of the first one.
        replay: number of the pass that repeats the context; None: they are tokens of the sequence itself.
    """

    slot: int
    eviction: Any
    tokens: slice
    start: int
    position: int
    replay: int | None = None

    @property
    def needs(self) -> Needs:
        """What the sequence's score needs."""
        found: Needs = self.eviction.policy.score.needs
        return found

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
        """Return what is kept of a sequence, by name."""
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


class MomentsProbe(Probe):
    """Mean and covariance of the context's queries before rotation, from position `Needs.moments_from` on.

    Hq d (d + 1) float32 numbers for each layer and sequence.
    """

    name = "queries"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        skip = max((seen.needs.moments_from or 0) - seen.position, 0)
        q, kept = q[skip:].float(), self.kept(seen.slot)
        if not (here := len(q)):
            return
        first = seen.position + skip
        back = -torch.arange(first, first + here, device=q.device)
        q = self.signals.turn(layer, q, back[:, None].expand(q.shape[:2])) * spec.scale
        mean = q.mean(dim=0)
        heads = (q - mean).transpose(0, 1)
        spread = heads.mT @ heads
        if before := kept.get(f"{layer}.count", 0):
            # Merging means keeps what one large sum of squares would lose to rounding.
            total, apart = before + here, mean - kept[f"{layer}.mean"]
            spread += kept[f"{layer}.spread"] + apart[:, :, None] * apart[:, None, :] * (
                before * here / total
            )
            mean = kept[f"{layer}.mean"] + apart * (here / total)
        kept |= {f"{layer}.count": before + here, f"{layer}.mean": mean, f"{layer}.spread": spread}

    def of(self, layer: int, slots: Sequence[int], shape: tuple[int, int]) -> QueryMoments:
        """Return moments of the queries of each sequence so far; zeros, of `shape` (Hq, d), where there are none."""
        zeros = torch.zeros(*shape, shape[1], device=self.signals.device)
        found = [self.kept(slot) for slot in slots]
        means = [each.get(f"{layer}.mean", zeros[..., 0]) for each in found]
        spreads = [each.get(f"{layer}.spread", zeros) / each.get(f"{layer}.count", 1) for each in found]
        return QueryMoments(torch.stack(means), torch.stack(spreads))


class ChunkProbe(Probe):
    """Non-causal attention within chunks of the context, of `Needs.chunk` tokens from `Needs.chunk_from` on."""

    name = "chunks"

    def at(self, layer: int, seen: Watched, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        needs, kept = seen.needs, self.kept(seen.slot)
        assert needs.chunk is not None, "who names this probe says how long a chunk is"
        kept["from"], skip = needs.chunk_from, max(needs.chunk_from - seen.position, 0)
        q, k, done = q[skip:], k[skip:], [kept[f"{layer}.done"]] if f"{layer}.done" in kept else []
        if f"{layer}.q" in kept:
            q, k = torch.cat([kept[f"{layer}.q"], q]), torch.cat([kept[f"{layer}.k"], k])
        while len(q) >= needs.chunk:
            done.append(_received(q[: needs.chunk], k[: needs.chunk]))
            q, k = q[needs.chunk :], k[needs.chunk :]
        # The batch's own memory is much larger.
        kept |= {f"{layer}.q": q.clone(), f"{layer}.k": k.clone()}
        if done:
            kept[f"{layer}.done"] = torch.cat(done, dim=1)

    def of(self, layer: int, slots: Sequence[int], num_heads: int) -> Tensor:
        """Return attention that each token received within its chunk: float32 [B, H, longest]; zeros outside chunks.

        The chunk in progress counts as if it were finished.
        """
        rows = []
        for slot in slots:
            kept = self.kept(slot)
            parts = [torch.zeros(num_heads, kept.get("from", 0), device=self.signals.device)]
            if f"{layer}.done" in kept:
                parts.append(kept[f"{layer}.done"])
            if len(q := kept.get(f"{layer}.q", ())):
                parts.append(_received(q, kept[f"{layer}.k"]))
            rows.append(torch.cat(parts, dim=1).T)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)


def _on(device: torch.device, kept: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each.to(device, copy=True) if isinstance(each, Tensor) else each for name, each in kept.items()
    }


def _received(q: Tensor, k: Tensor) -> Tensor:
    """Return attention that the tokens of a chunk, [n, Hq, d] and [n, H, d], give each other: float32 [H, n]."""
    q, k = q.float().transpose(0, 1), k.float().transpose(0, 1)
    grouped = q.unflatten(0, (len(k), -1))  # [H, g, n, d]
    return (grouped @ k[:, None].mT).softmax(dim=-1).sum(dim=2).mean(dim=1)
