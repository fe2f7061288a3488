"""State that the attention layers of one forward pass share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from winnow.attention import AttentionSpec, BackendStep, HeadRotation
from winnow.attention.native_step import NativeStep
from winnow.attention.torch_backend import written_slots
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction.predictor import PredictorSource
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.reconstruction import ReplaySpan, ReplayWeights, observe_replay
from winnow.executor.occupants import Occupants
from winnow.executor.signals import EngineSignals


@dataclass(frozen=True)
class PredictedSpan:
    """Consecutive tokens of a packed batch whose KVs one predictor scores."""

    source: PredictorSource
    tokens: slice


@dataclass(frozen=True)
class PagedAttentionStep:
    """A packed batch over the paged cache; see `winnow.models.AttentionStep`."""

    batch: BackendStep
    signals: EngineSignals
    watched: Tensor | None
    """Tokens that count for the similarity of hidden states, [T]."""
    logits_indices: Tensor | None
    """Tokens whose logits are wanted, int64 [n]; None: all of the batch."""
    probes: tuple[tuple[Probe, Watched], ...] = ()
    """Tokens that policies watch."""
    replays: tuple[ReplaySpan, ...] = ()
    """Tokens that repeat a context."""
    predicted: tuple[PredictedSpan, ...] = ()
    """Tokens whose KVs are scored as they are computed."""
    hidden: list[Tensor] = field(default_factory=list)
    """Input of the layer in progress."""
    inputs: list[Tensor] = field(default_factory=list)
    """Input of its attention, [T, hidden_size]."""

    @property
    def native(self) -> NativeStep | None:
        """Return the batch for layers that are one native call; None: something between is looked at."""
        looked_at = self.probes or self.replays or self.predicted
        return None if looked_at else self.batch.whole_layers

    @property
    def watching(self) -> bool:
        return self.watched is not None

    @property
    def wants_inputs(self) -> bool:
        return bool(self.predicted) or any(span.normalized for span in self.replays)

    def enter_attention(self, normed: Tensor) -> None:
        self.inputs[:] = [normed]

    def enter_layer(self, hidden: Tensor) -> None:
        self.hidden[:] = [hidden[0]]

    def leave_attention(self, layer: int, out: Tensor) -> None:
        assert self.watched is not None, "called only while watching"
        before = self.hidden[0]
        self.signals.add_similarity(layer, self.batch.spans, self.watched, before, before + out[0])

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        return self.batch.rotate_and_write(layer, heads, query_heads, rotation)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.batch.write(layer, k, v)
        return self.attend_written(layer, q, k, v, spec)

    def attend_written(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        for probe, seen in self.probes:
            if not probe.evictable_only or layer in self.batch.cache.pool.layout.evictable:
                probe.at(layer, seen, q[seen.tokens], k[seen.tokens], v[seen.tokens], spec)
        if self.predicted:
            self._predict(layer, k, v)
        # Layers with a window take no part in rounds, and hold no more of the context than it sees.
        for span in self.replays if layer in self.batch.cache.pool.layout.evictable else ():
            weights = self._weights(span, layer) if span.normalized else None
            observe_replay(self.batch, span, layer, q[span.tokens], spec, weights)
        if self._only_scores and layer == self.batch.cache.pool.layout.num_layers - 1:
            return q.new_zeros(q.shape)  # nobody reads it
        return self.batch.attend(layer, q, spec)

    @property
    def _only_scores(self) -> bool:
        """Return whether no token's logits are wanted, and no token but those of replays is computed."""
        replayed = sum(span.tokens.stop - span.tokens.start for span in self.replays)
        return replayed == len(self.batch.spans.position)

    def _predict(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = self._written_slots[layer][:, : self.batch.cache.pool.layout.heads[layer]]
        for span in self.predicted:
            scorer, tokens, ranks = self.signals.predictor(span.source), span.tokens, self.signals.ranks
            keys, values = ranks.join(k[tokens], 1), ranks.join(v[tokens], 1)
            score = scorer.predict(layer, self.inputs[0][tokens], keys, values)
            self.batch.cache.pool.numbers.set_accumulator(slots[tokens], ranks.own(score, 1))

    @cached_property
    def _written_slots(self) -> Tensor:
        return written_slots(self.batch.cache, self.batch.spans)

    def _weights(self, span: ReplaySpan, layer: int) -> ReplayWeights:
        return ReplayWeights(self.signals.output_products(layer), self.inputs[0][span.tokens])


def replay_spans(plan: StepPlan, occupants: Occupants) -> tuple[ReplaySpan, ...]:
    """Return where the plan repeats contexts."""
    spans: list[ReplaySpan] = []
    first = 0
    for entry in plan.entries:
        if entry.replay is not None:
            eviction = occupants[entry.slot].eviction
            assert eviction is not None, "only policies replay"
            replay, needs = eviction.passes[entry.replay], eviction.policy.score.needs
            tokens, done = slice(first, first + entry.count), entry.start - replay.context_len
            spans.append(ReplaySpan(entry.slot, replay, tokens, done, needs.inputs))
        first += entry.count
    return tuple(spans)


def predicted_spans(plan: StepPlan, occupants: Occupants) -> tuple[PredictedSpan, ...]:
    """Return the spans of tokens whose KVs a predictor scores: the context, and what follows it where later rounds use
    the scores.
    """
    spans: list[PredictedSpan] = []
    first = 0
    for entry in plan.entries:
        eviction, end = occupants[entry.slot].eviction, first + entry.count
        if eviction is not None and entry.replay is None:
            source = eviction.policy.score.needs.predictor
            if source is not None and (entry.start < eviction.context_len or eviction.policy.when.in_decode):
                last = spans[-1] if spans else None
                if last is not None and last.source == source and last.tokens.stop == first:
                    spans[-1] = PredictedSpan(source, slice(last.tokens.start, end))
                else:
                    spans.append(PredictedSpan(source, slice(first, end)))
        first = end
    return tuple(spans)


@dataclass(frozen=True)
class LogitsRows:
    """Tokens of the packed batch that need logits, and what for.

    Attributes:
        tokens: indices into the packed batch; the others index the logits of these.
        samples: the row of each of `StepPlan.samplers`, and behind it those of its drafts.
        prompts: by entry: the rows that predict prompt tokens whose logprobs are asked for.
    """

    tokens: list[int]
    samples: list[int]
    prompts: dict[int, slice]

    @classmethod
    def of(cls, entries: Sequence[PlannedSequence]) -> "LogitsRows":
        tokens: list[int] = []
        samples: list[int] = []
        prompts: dict[int, slice] = {}
        first = 0
        for index, entry in enumerate(entries):
            if entry.logprobs is not None:
                known, last = entry.logprobs
                prompts[index] = slice(len(tokens), len(tokens) + last - known)
                tokens += range(first + known - entry.start, first + last - entry.start)
            first += len(entry.token_ids)
            if entry.num_drafts:
                samples += range(len(tokens), len(tokens) + 1 + entry.num_drafts)
                tokens += range(first - 1 - entry.num_drafts, first)
            elif entry.samplers:
                samples += [len(tokens)] * len(entry.samplers)
                tokens.append(first - 1)
        return cls(tokens, samples, prompts)
