"""State that the attention layers of one forward pass share."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from winnow.attention import AttentionSpec, BackendStep, HeadRotation
from winnow.attention.interface import NativeStep
from winnow.engine.plan import PlannedSequence, StepPlan
from winnow.eviction.probes import Probe, Watched
from winnow.eviction.replay import ReplaySpan, observe_replay
from winnow.executor.occupants import Occupants


@dataclass(frozen=True)
class PagedAttentionStep:
    """A packed batch over the paged cache; see `winnow.models.AttentionStep`."""

    batch: BackendStep
    logits_indices: Tensor | None
    """Tokens whose logits are wanted, int64 [n]; None: all of the batch."""
    probes: tuple[tuple[Probe, Watched], ...] = ()
    """Tokens that policies watch."""
    replays: tuple[ReplaySpan, ...] = ()
    """Tokens that repeat a context."""

    @property
    def native(self) -> NativeStep | None:
        """Return the batch for layers that are one native call; None: something between is looked at."""
        return None if self.probes or self.replays else self.batch.whole_layers

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        return self.batch.rotate_and_write(layer, heads, query_heads, rotation)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.batch.write(layer, k, v)
        return self.attend_written(layer, q, k, v, spec)

    def attend_written(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        for probe, seen in self.probes:
            if not probe.evictable_only or layer in self.batch.cache.pool.layout.evictable:
                probe.at(layer, seen, q[seen.tokens], k[seen.tokens], v[seen.tokens], spec)
        # Layers with a window take no part in rounds, and hold no more of the context than it sees.
        for span in self.replays if layer in self.batch.cache.pool.layout.evictable else ():
            observe_replay(self.batch, span, layer, q[span.tokens], spec)
        if self._only_scores and layer == self.batch.cache.pool.layout.num_layers - 1:
            return q.new_zeros(q.shape)  # nobody reads it
        return self.batch.attend(layer, q, spec)

    @property
    def _only_scores(self) -> bool:
        """Return whether no token's logits are wanted, and no token but those of replays is computed."""
        replayed = sum(span.tokens.stop - span.tokens.start for span in self.replays)
        return replayed == len(self.batch.spans.position)


def replay_spans(plan: StepPlan, occupants: Occupants) -> tuple[ReplaySpan, ...]:
    """Return where the plan repeats contexts."""
    spans: list[ReplaySpan] = []
    first = 0
    for entry in plan.entries:
        if entry.replay is not None:
            eviction = occupants[entry.slot].eviction
            assert eviction is not None, "only policies replay"
            replay = eviction.passes[entry.replay]
            tokens, done = slice(first, first + entry.count), entry.start - replay.context_len
            spans.append(ReplaySpan(entry.slot, replay, tokens, done))
        first += entry.count
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
