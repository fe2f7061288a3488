"""Reference queries of policies that fit what they keep, remembered from when they are computed until the round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow.attention import AttentionSpec
from winnow.cache.layout import ceil_div
from winnow.cache.slot_states import SlotState
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction import SequenceEviction
from winnow.eviction.signals import ReferenceQueries
from winnow.executor.occupants import Occupants


@dataclass(frozen=True)
class ReferenceSpan:
    """Tokens of one sequence in a packed batch whose queries are kept for a fit.

    Attributes:
        part: the pass of a replay that they belong to; 0 for a window.
        tokens: indices in the batch, evenly spaced.
        position: of the first of them.
        again: whether what is known of the part is forgotten first, as it is computed from its beginning.
    """

    slot: int
    part: int
    tokens: slice
    position: int
    again: bool


@dataclass
class _Remembered:
    """Queries of one sequence by part and layer: [n, Hq, d] each; their positions by part; and each layer's spec."""

    queries: dict[int, dict[int, list[Tensor]]] = field(default_factory=dict)
    positions: dict[int, list[range]] = field(default_factory=dict)
    specs: dict[int, AttentionSpec] = field(default_factory=dict)

    def copy(self, device: torch.device | None = None) -> "_Remembered":
        parts = {
            part: {
                layer: [q if device is None else q.to(device) for q in each] for layer, each in layers.items()
            }
            for part, layers in self.queries.items()
        }
        positions = {part: list(each) for part, each in self.positions.items()}
        return _Remembered(parts, positions, dict(self.specs))

    @property
    def nbytes(self) -> int:
        return sum(q.nbytes for layers in self.queries.values() for each in layers.values() for q in each)


class ReferenceStates(SlotState):
    """Reference queries by slot, in the format of activations: of about `Fit.most_queries` positions."""

    name = "references"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sequences: dict[int, _Remembered] = {}

    def note(self, plan: StepPlan, occupants: Occupants) -> tuple[ReferenceSpan, ...]:
        """Start a step. Returns the spans of the batch whose queries are kept for a fit."""
        spans, first = [], 0
        for entry in plan.entries:
            eviction = occupants[entry.slot].eviction
            if eviction is not None and eviction.policy.compact is not None:
                span = _span(entry, eviction, first)
                if span is not None:
                    spans.append(span)
                elif entry.replay is None and entry.start >= eviction.context_len:
                    self.close(entry.slot)  # no round will ask any more
            first += entry.count
        for span in spans:
            known = self._sequences.setdefault(span.slot, _Remembered())
            if span.again:
                known.queries[span.part], known.positions[span.part] = {}, []
            count = len(range(span.tokens.start, span.tokens.stop, span.tokens.step))
            known.positions.setdefault(span.part, []).append(
                range(span.position, span.position + count * span.tokens.step, span.tokens.step)
            )
        return tuple(spans)

    def add(self, layer: int, spans: Sequence[ReferenceSpan], q: Tensor, spec: AttentionSpec) -> None:
        """Remember a layer's queries, [T, Hq, d], rotated at their positions."""
        for span in spans:
            known = self._sequences[span.slot]
            known.specs[layer] = spec
            # The batch's own memory is much larger.
            known.queries.setdefault(span.part, {}).setdefault(layer, []).append(q[span.tokens].clone())

    def of(self, layer: int, slot: int) -> ReferenceQueries | None:
        """Return the queries of a layer; None: there are none."""
        known = self._sequences.get(slot)
        if known is None or layer not in known.specs:
            return None
        parts = [part for part, layers in known.queries.items() if layer in layers]
        q = torch.cat([each for part in parts for each in known.queries[part][layer]])
        position = [at for part in parts for each in known.positions[part] for at in each]
        return ReferenceQueries(q, torch.tensor(position, device=self._device), known.specs[layer])

    def nbytes(self, slot: int) -> int:
        return self._sequences[slot].nbytes if slot in self._sequences else 0

    def fork(self, slot: int, to: int) -> None:
        if slot in self._sequences:
            self._sequences[to] = self._sequences[slot].copy()

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> _Remembered | None:
        return self._sequences[slot].copy(torch.device("cpu")) if slot in self._sequences else None

    def load(self, slot: int, saved: _Remembered) -> None:
        self._sequences[slot] = saved.copy(self._device)

    def close(self, slot: int) -> None:
        self._sequences.pop(slot, None)


def _span(entry: PlannedSequence, eviction: SequenceEviction, first: int) -> ReferenceSpan | None:
    """Return which of an entry's tokens, the batch's from `first` on, are remembered; None: none."""
    fit = eviction.policy.compact
    assert fit is not None, "the policy fits what it keeps"
    if fit.queries == "replay":
        if entry.replay is None:
            return None
        every = ceil_div(sum(each.length for each in eviction.passes), fit.most_queries)
        part, start, end = entry.replay, entry.start, entry.end
        since = eviction.context_len
    else:
        # The queries that the next round observes, all in one chunk; none where no round follows it.
        observer, since = eviction.observe(entry.start, entry.end)
        if observer is None or entry.start >= eviction.context_len:
            return None
        part, start, end = 0, since, entry.end
        every = ceil_div(end - start, fit.most_queries)
    start += -(start - since) % every
    if start >= end:
        return None
    tokens = slice(first + start - entry.start, first + end - entry.start, every)
    position = start - entry.position_offset
    return ReferenceSpan(entry.slot, part, tokens, position, again=start == since)
