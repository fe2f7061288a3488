"""Batches whose sequences are computed in parts: over tables of their own, or by another backend."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from winnow.attention.interface import AttentionBackend, AttentionSpec, BackendStep, ReplayQueries
from winnow.attention.ranked_rows import RankedRows
from winnow.attention.spans import Spans
from winnow.cache import KVPool, PagedCache


@dataclass(frozen=True)
class BatchPart:
    """Tokens of a packed batch that attend over one cache together.

    Attributes:
        tokens: int64 [n], their indices in the batch.
        step: what computes their attention.
    """

    tokens: Tensor
    step: BackendStep


class PartedStep(BackendStep):
    """A batch that is written as a whole, and attends in parts. Together these have each token once."""

    def __init__(self, whole: BackendStep, parts: Sequence[BatchPart]) -> None:
        super().__init__(whole.cache, whole.spans)
        self._whole, self.parts = whole, tuple(parts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._whole.write(layer, k, v)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        out = q.new_empty((*q.shape[:2], self.cache.pool.of_layer(layer).kind.value_size))
        for part in self.parts:
            out[part.tokens] = part.step.attend(layer, q[part.tokens], spec)
        return out

    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        self._whole.replay(layer, slot, queries, spec)


class ComposedBackend(AttentionBackend):
    """Backend that gives sequences whose queries are observed to one backend, and all else to another.

    So a library that attends fast, and tells nothing of its weights, serves beside policies that watch queries.
    """

    def __init__(self, plain: AttentionBackend, observing: AttentionBackend) -> None:
        self._plain, self._observing = plain, observing

    def prepare(self, cache: PagedCache, spans: Spans) -> BackendStep:
        observed = [i for i, observe in enumerate(spans.observe) if observe is not None]
        if len(observed) == len(spans.observe):
            return self._observing.prepare(cache, spans)
        whole = self._plain.prepare(cache, spans)
        if not observed:
            return whole
        others = [i for i, observe in enumerate(spans.observe) if observe is None]
        sides = ((self._observing, observed), (self._plain, others))
        parts = (
            BatchPart(spans.tokens_of(some), backend.prepare(cache, spans.only(some)))
            for backend, some in sides
        )
        return PartedStep(whole, tuple(parts))

    def compact(self, pool: KVPool, source: Tensor, target: Tensor) -> None:
        self._observing.compact(pool, source, target)

    def keep_best(self, pool: KVPool, rows: RankedRows, kept: Tensor, most_evicted: int) -> None:
        self._observing.keep_best(pool, rows, kept, most_evicted)
