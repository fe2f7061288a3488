"""Signals of a context's queries, learnt while it is computed, for scores that ask."""

from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow.cache.slot_states import SlotState
from winnow.engine.plan import StepPlan
from winnow.eviction import Needs, QueryMoments
from winnow.eviction.positions import Rotation
from winnow.executor.occupants import Occupants


@dataclass(frozen=True)
class WatchedQueries:
    """Tokens of one sequence in a packed batch whose queries its policy needs."""

    slot: int
    needs: Needs
    first: int
    """First of them in the batch."""
    count: int
    position: int
    """Position of the first one."""


@dataclass
class _Moments:
    """Moments of the queries of one layer so far, float32.

    Attributes:
        mean: [Hq, d].
        spread: [Hq, d, d], the sum of the outer products of queries less their mean.
    """

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    spread: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))

    def add(self, q: Tensor) -> None:
        """Add queries, float32 [n, Hq, d]. Merging means keeps what one large sum of squares would lose to rounding."""
        here, mean = len(q), q.mean(dim=0)
        heads = (q - mean).transpose(0, 1)
        spread = heads.mT @ heads
        if self.count:
            total = self.count + here
            apart = mean - self.mean
            spread += self.spread + apart[:, :, None] * apart[:, None, :] * (self.count * here / total)
            mean = self.mean + apart * (here / total)
        self.count, self.mean, self.spread = self.count + here, mean, spread

    def copy(self) -> "_Moments":
        return _Moments(self.count, self.mean, self.spread)  # `add` replaces tensors, and changes none

    def to(self, device: torch.device) -> "_Moments":
        return _Moments(self.count, self.mean.to(device), self.spread.to(device))

    @property
    def nbytes(self) -> int:
        return self.mean.nbytes + self.spread.nbytes


@dataclass
class _Chunks:
    """Attention within chunks of one layer so far.

    Attributes:
        done: [H, n] each, what tokens of finished chunks got.
        queries: [n, Hq, d] each, of the chunk in progress; keys: [n, H, d] each.
    """

    done: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)

    def add(self, q: Tensor, k: Tensor, chunk: int) -> None:
        while len(q):
            room = chunk - sum(map(len, self.queries))
            self.queries.append(q[:room].clone())  # the batch's own memory is much larger
            self.keys.append(k[:room].clone())
            if len(q) >= room:
                self.done.append(self._current())
                self.queries, self.keys = [], []
            q, k = q[room:], k[room:]

    def received(self) -> list[Tensor]:
        """Return the chunk in progress counts as if it were finished."""
        return [*self.done, self._current()] if self.queries else self.done

    def copy(self) -> "_Chunks":
        return _Chunks(list(self.done), list(self.queries), list(self.keys))

    def to(self, device: torch.device) -> "_Chunks":
        return _Chunks(*([each.to(device) for each in part] for part in self._parts))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for part in self._parts for each in part)

    @property
    def _parts(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return self.done, self.queries, self.keys

    def _current(self) -> Tensor:
        q, k = torch.cat(self.queries).float().transpose(0, 1), torch.cat(self.keys).float().transpose(0, 1)
        grouped = q.unflatten(0, (len(k), -1))  # [H, g, n, d]
        share = (grouped @ k[:, None].mT).softmax(dim=-1)
        return share.sum(dim=2).mean(dim=1)


@dataclass
class SequenceQueries:
    """Queries of one sequence, by layer."""

    needs: Needs
    moments: dict[int, _Moments] = field(default_factory=dict)
    chunks: dict[int, _Chunks] = field(default_factory=dict)

    def copy(self) -> "SequenceQueries":
        return SequenceQueries(
            self.needs,
            {layer: moments.copy() for layer, moments in self.moments.items()},
            {layer: chunks.copy() for layer, chunks in self.chunks.items()},
        )

    def to(self, device: torch.device) -> "SequenceQueries":
        return SequenceQueries(
            self.needs,
            {layer: moments.to(device) for layer, moments in self.moments.items()},
            {layer: chunks.to(device) for layer, chunks in self.chunks.items()},
        )

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for part in (self.moments, self.chunks) for each in part.values())


class QuerySignals(SlotState):
    """See `winnow.eviction.Signals`. Holds Hq d (d + 1) float32 numbers per layer and sequence for moments."""

    name = "queries"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rotation: Rotation | None = None
        """Must be set before a sequence whose score needs moments is computed."""
        self._sequences: dict[int, SequenceQueries] = {}

    def note(self, plan: StepPlan, occupants: Occupants) -> tuple[WatchedQueries, ...]:
        """Start a step. Returns the spans of the batch whose queries policies need."""
        watched, first = [], 0
        for entry in plan.entries:
            eviction = occupants[entry.slot].eviction
            # The queries of a repetition are not the context's.
            needs = None if eviction is None or entry.replay is not None else eviction.policy.score.needs
            if eviction is not None and needs is not None and needs.queries:
                if entry.start == 0:
                    self._sequences[entry.slot] = SequenceQueries(needs)
                if entry.start < eviction.context_len:
                    position = entry.start - entry.position_offset
                    watched.append(WatchedQueries(entry.slot, needs, first, entry.count, position))
                elif not eviction.policy.when.in_decode:
                    self._sequences.pop(entry.slot, None)  # no round will ask any more
            first += entry.count
        return tuple(watched)

    def add(
        self, layer: int, watched: SequenceType[WatchedQueries], q: Tensor, k: Tensor, scale: float
    ) -> None:
        """Look at a layer's queries, [T, Hq, d], and keys, [T, H, d], both rotated."""
        for each in watched:
            sequence, needs = self._sequences[each.slot], each.needs
            if needs.moments_from is not None:
                part, position = _part(each, needs.moments_from)
                if part.start < part.stop:
                    self._add_moments(sequence, layer, q[part], position, scale)
            if needs.chunk is not None:
                part, _ = _part(each, needs.chunk_from)
                chunks = sequence.chunks.setdefault(layer, _Chunks())
                chunks.add(q[part], k[part], needs.chunk)

    def nbytes(self, slot: int) -> int:
        return self._sequences[slot].nbytes if slot in self._sequences else 0

    def fork(self, slot: int, to: int) -> None:
        if slot in self._sequences:
            self._sequences[to] = self._sequences[slot].copy()

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> SequenceQueries | None:
        if slot not in self._sequences:
            return None
        return self._sequences[slot].copy().to(torch.device("cpu"))

    def load(self, slot: int, saved: SequenceQueries) -> None:
        self._sequences[slot] = saved.copy().to(self._device)

    def close(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def moments(self, layer: int, slots: SequenceType[int], shape: tuple[int, int]) -> QueryMoments:
        """Return zeros, of `shape` (Hq, d), where no query has been seen yet."""
        heads, dim = shape
        means, covariances = [], []
        for slot in slots:
            found = self._sequences[slot].moments.get(layer)
            if found is None:
                mean = torch.zeros(heads, dim, device=self._device)
                found = _Moments(1, mean, torch.zeros(heads, dim, dim, device=self._device))
            means.append(found.mean)
            covariances.append(found.spread / found.count)
        return QueryMoments(torch.stack(means), torch.stack(covariances))

    def chunk_attention(self, layer: int, slots: SequenceType[int], num_heads: int) -> Tensor:
        rows = []
        for slot in slots:
            sequence = self._sequences[slot]
            chunks = sequence.chunks.get(layer)
            received = chunks.received() if chunks is not None else []
            before = torch.zeros(num_heads, sequence.needs.chunk_from, device=self._device)
            rows.append(torch.cat([before, *received], dim=1).T)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)

    def _add_moments(
        self, sequence: SequenceQueries, layer: int, q: Tensor, position: int, scale: float
    ) -> None:
        assert self.rotation is not None, "checked when the policy was prepared"
        back = -torch.arange(position, position + len(q), device=q.device)
        unrotated = self.rotation.turn(layer, q.float(), back[:, None].expand(q.shape[:2]))
        sequence.moments.setdefault(layer, _Moments()).add(unrotated * scale)


def _part(each: WatchedQueries, start: int) -> tuple[slice, int]:
    """Return the tokens of the batch whose positions are not below `start`, and the position of the first of them."""
    skipped = min(max(start - each.position, 0), each.count)
    return slice(each.first + skipped, each.first + each.count), each.position + skipped
