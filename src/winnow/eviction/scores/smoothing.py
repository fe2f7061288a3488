"""Smoothing of scores that do not come from queries."""

from torch import Tensor

from winnow.attention import Smoothing
from winnow.attention.observer_reference import smooth
from winnow.eviction.kernels import RowKernels
from winnow.eviction.rows import LayerRows


def smoothed(score: Tensor, rows: LayerRows, pool: Smoothing | None) -> Tensor:
    """`score`, float32 [B, H, N], pooled over neighbours; `pool` None: as it is."""
    if pool is None:
        return score
    kernels = RowKernels.of(rows)
    if kernels is not None:
        return kernels.pooled(score, pool)
    return smooth(score[:, :, None], rows.position, rows.valid, pool)[:, :, 0]
