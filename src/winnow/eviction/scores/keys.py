"""Scorers that use keys alone, so that they hold for any later question."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.eviction.kernels import RowKernels
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Keys of small norm attract attention (Devoto et al., "A simple and effective L2 norm-based strategy", 2024)."""

    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        return -rows.keys().norm(dim=-1)


@dataclass(frozen=True)
class KeyDifference(Scorer):
    """Minus the cosine of a key and the row's mean direction (KeyDiff)."""

    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        kernels = RowKernels.of(rows)
        return key_difference(rows) if kernels is None else kernels.key_difference()


def key_difference(rows: LayerRows) -> Tensor:
    """Return the minus the cosine of each key and the row's mean direction by plain torch: float32 [B, H, N]."""
    keys = rows.keys()
    scale = 1.0 / keys.norm(dim=-1).clamp_min(_LEAST_NORM)
    # Products avoid a normalized copy of all keys; the sum has the direction of the mean.
    anchor = scale[:, :, None] @ keys
    along = (keys @ anchor.mT)[..., 0] * scale
    return -along / anchor.norm(dim=-1).clamp_min(_LEAST_NORM)


_LEAST_NORM = 1e-12
