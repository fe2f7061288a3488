"""Batches whose sequences are computed in parts, over tables of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from winnow.attention.interface import AttentionSpec, BackendStep, HeadRotation, ReplayQueries


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
    """Step of a batch that is written as a whole and attends in parts, which together hold each token once."""

    def __init__(self, whole: BackendStep, parts: Sequence[BatchPart]) -> None:
        super().__init__(whole.cache, whole.spans)
        self._whole, self.parts = whole, tuple(parts)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._whole.write(layer, k, v)

    def rotate_and_write(self, layer: int, heads: Tensor, query_heads: int, rotation: HeadRotation) -> bool:
        return self._whole.rotate_and_write(layer, heads, query_heads, rotation)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        out = q.new_empty((*q.shape[:2], self.cache.pool.of_layer(layer).kind.value_size))
        for part in self.parts:
            out[part.tokens] = part.step.attend(layer, q[part.tokens], spec)
        return out

    def replay(self, layer: int, slot: int, queries: ReplayQueries, spec: AttentionSpec) -> None:
        self._whole.replay(layer, slot, queries, spec)
