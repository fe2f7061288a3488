"""What the attention layers of one forward pass share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, PagedCache, Spans
from winnow.attention.native_step import NativeStep
from winnow.attention.torch_backend import written_slots
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction.predictor import PredictorSource
from winnow.eviction.reconstruction import ReplaySpan, ReplayWeights, observe_replay
from winnow.executor.query_signals import WatchedQueries
from winnow.executor.signals import EngineSignals
from winnow.executor.slots import SlotStates


@dataclass(frozen=True)
class PredictedTokens:
    """Tokens of a packed batch whose KVs' scores one predictor predicts.

    Attributes:
        tokens: their indices in the batch, int64 [n].
    """

    source: PredictorSource
    tokens: Tensor


@dataclass(frozen=True)
class PagedAttentionStep:
    """A packed batch over the paged cache; see `winnow.models.AttentionStep`."""

    backend: AttentionBackend
    cache: PagedCache
    spans: Spans
    signals: EngineSignals
    watched: Tensor | None
    """Which tokens count for the similarity of hidden states, [T]."""
    logits_indices: Tensor | None
    """Tokens whose logits are wanted, int64 [n]; None: all of the batch."""
    native: NativeStep | None
    """The same for the kernels, where they may compute whole layers."""
    queries: tuple[WatchedQueries, ...] = ()
    """Whose queries are looked at."""
    replays: tuple[ReplaySpan, ...] = ()
    """Which of the tokens repeat a context."""
    predicted: tuple[PredictedTokens, ...] = ()
    """Which of the tokens' KVs are scored as they are computed."""
    hidden: list[Tensor] = field(default_factory=list)
    """What the layer in progress received."""
    inputs: list[Tensor] = field(default_factory=list)
    """What its attention is computed from, [T, hidden_size]."""

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
        self.signals.add_similarity(layer, self.spans, self.watched, before, before + out[0])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.write(self.cache, self.spans, layer, k, v)
        if self.queries:
            self.signals.queries.add(layer, self.queries, q, k, spec.scale)
        if self.predicted:
            self._predict(layer, k, v)
        for span in self.replays:
            weights = self._weights(span, layer) if span.normalized else None
            observe_replay(self.cache, self.backend, span, layer, q[span.tokens], spec, weights)
        if self._only_scores and layer == self.cache.pool.layout.num_layers - 1:
            return q.new_zeros(q.shape)  # nobody reads it
        return self.backend.attend(self.cache, self.spans, layer, q, spec)

    @property
    def _only_scores(self) -> bool:
        """Whether no token's logits are wanted, and no token but those of replays is computed."""
        replayed = sum(span.tokens.stop - span.tokens.start for span in self.replays)
        return replayed == len(self.spans.position)

    def _predict(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = written_slots(self.cache, self.spans, layer)
        for part in self.predicted:
            scorer, chosen = self.signals.predictor(part.source), part.tokens
            score = scorer.predict(layer, self.inputs[0][chosen], k[chosen], v[chosen])
            self.cache.pool.set_accumulator(slots[part.tokens], score)

    def _weights(self, span: ReplaySpan, layer: int) -> ReplayWeights:
        return ReplayWeights(self.signals.output_products(layer), self.inputs[0][span.tokens])


def replay_spans(plan: StepPlan, states: SlotStates) -> tuple[ReplaySpan, ...]:
    """Where the plan repeats contexts."""
    spans: list[ReplaySpan] = []
    first = 0
    for entry in plan.entries:
        if entry.replay is not None:
            eviction = states[entry.slot].eviction
            assert eviction is not None, "only policies replay"
            replay, needs = eviction.passes[entry.replay], eviction.policy.score.needs
            tokens, done = slice(first, first + entry.count), entry.start - replay.context_len
            spans.append(ReplaySpan(entry.slot, replay, tokens, done, needs.inputs))
        first += entry.count
    return tuple(spans)


def predicted_tokens(plan: StepPlan, states: SlotStates, device: torch.device) -> tuple[PredictedTokens, ...]:
    """Whose KVs a predictor scores: the context's, and those after it where later rounds read their scores."""
    found: dict[PredictorSource, list[int]] = {}
    first = 0
    for entry in plan.entries:
        eviction = states[entry.slot].eviction
        source = (
            None if eviction is None or entry.replay is not None else eviction.policy.score.needs.predictor
        )
        if eviction is not None and source is not None:
            scored = entry.start < eviction.context_len or eviction.policy.when.in_decode
            found.setdefault(source, []).extend(range(first, first + entry.count) if scored else ())
        first += entry.count
    return tuple(
        PredictedTokens(source, torch.tensor(tokens, device=device))
        for source, tokens in found.items()
        if tokens
    )


@dataclass(frozen=True)
class LogitsRows:
    """Which tokens of the packed batch need logits, and what for.

    Attributes:
        tokens: indices into the packed batch; the others index the logits of these.
        samples: the row of each of `StepPlan.samplers`.
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
            if entry.samplers:
                samples += [len(tokens)] * len(entry.samplers)
                tokens.append(first - 1)
        return cls(tokens, samples, prompts)
