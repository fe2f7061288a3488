"""Compactor: leverage of keys blended with attention within chunks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.attention import Smoothing
from winnow.attention.observer_reference import smooth
from winnow.errors import ConfigError
from winnow.eviction.probes import ChunkProbe
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.scores.expected import ChunkAttention
from winnow.eviction.scores.leverage import Leverage
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Compactor(Scorer):
    """blending z(leverage of unrotated keys) + z(attention within chunks times the norm of the value, pooled).

    z subtracts the mean over the layer's KVs and divides by their standard deviation, all heads together. Protected KVs
    are excluded throughout (Chari and Van Durme, "Compactor", 2025). Its authors approximate leverage by a random
    sketch; here it is exact, with a ridge.
    """

    factors: ClassVar[bool] = False
    chunk: int = 256
    sinks: int = 8
    """The first chunk begins at this position."""
    blending: float | None = None
    """Weight of the leverage; None: the share of KVs that the round evicts."""
    ridge: float = 0.01
    """Share of the mean eigenvalue; see `Leverage`."""
    pool: int = 3
    """Number of neighbours over which attention is averaged."""

    def __post_init__(self) -> None:
        if self.blending is not None and not self.blending >= 0.0:
            raise ConfigError(f"blending must be at least 0, got {self.blending}")
        self._attention, self._leverage, self._pool  # noqa: B018  # runs their checks

    @property
    def _attention(self) -> ChunkAttention:
        return ChunkAttention(self.chunk, self.sinks)

    @property
    def _leverage(self) -> Leverage:
        return Leverage(self.ridge, unrotated=True)

    @property
    def _pool(self) -> Smoothing:
        return Smoothing(self.pool, "average")

    @property
    def needs(self) -> Needs:
        return Needs((ChunkProbe,), chunk=self.chunk, chunk_from=self.sinks, rotation=True)

    def score(self, rows: LayerRows) -> Tensor:
        counted = rows.valid & ~rows.protected
        attention = self._attention.score(rows) * rows.values().norm(dim=-1)
        attention = smooth(attention[:, :, None], rows.position, counted, self._pool)[:, :, 0]
        leverage = self._leverage.of(rows, counted)
        counted = rows.over_ranks(counted)
        of_keys = _standard(leverage, rows.over_ranks(leverage), counted)
        return self._weight(rows) * of_keys + _standard(attention, rows.over_ranks(attention), counted)

    def _weight(self, rows: LayerRows) -> Tensor | float:
        if self.blending is not None:
            return self.blending
        return (1.0 - rows.round.budget / rows.round.tokens).clamp_min(0.0)[:, None, None].float()


def _standard(x: Tensor, every: Tensor, counted: Tensor) -> Tensor:
    """Standardize x, [B, H, N], by the mean and deviation of those of all heads, `every`, that are counted."""
    count = counted.sum(dim=(1, 2), keepdim=True).clamp_min(2)
    mean = (every * counted).sum(dim=(1, 2), keepdim=True) / count
    far = ((every - mean) * counted).square().sum(dim=(1, 2), keepdim=True)
    deviation = torch.sqrt(far / (count - 1)).clamp_min(_LEAST_DEVIATION)
    return (x - mean) / deviation


_LEAST_DEVIATION = 1e-6
