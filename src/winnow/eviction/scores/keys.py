"""Scorers that use keys alone, so that they hold for any later question."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from winnow.eviction.kernels import key_difference_kernel
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import KeyDirections, Needs


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """Keys of small norm attract attention (Devoto et al., "A simple and effective L2 norm-based strategy", 2024)."""

    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        return -rows.keys().norm(dim=-1)


@dataclass(frozen=True)
class KeyDifference(Scorer):
    """Minus the cosine of a key and the row's mean direction (KeyDiff)."""

    by_row: ClassVar[bool] = True
    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        kernel = key_difference_kernel(rows)
        return key_difference(rows) if kernel is None else kernel(None, None)


@dataclass(frozen=True)
class KeyDeviation(Scorer):
    """1 - the cosine of a key before rotation and the mean direction of all keys that its row has seen.

    High for keys unlike the others, whatever their position. The mean goes over the tokens computed, evicted ones
    included, so that what later rounds keep does not depend on what earlier ones kept. Scores of different rows are
    comparable: budgets should let all rows compete (`AdaptiveRows`).
    """

    by_row: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return Needs(rotation=True, directions=True)

    def score(self, rows: LayerRows) -> Tensor:
        directions = rows.key_directions()
        kernel = key_difference_kernel(rows)
        if kernel is None:
            score = key_deviation(rows, directions)
        else:
            score = kernel(directions, rows.rotation_table()).add_(1.0)
        rows.keep_key_directions(directions.sums)
        return score


def key_deviation(rows: LayerRows, directions: KeyDirections) -> Tensor:
    """Return scores of `KeyDeviation` by plain torch, float32 [B, H, N]; adds new keys to `directions.sums`."""
    keys = rows.unrotated_keys()
    scale = 1.0 / keys.norm(dim=-1).clamp_min(_LEAST_NORM)
    new = rows.valid & (rows.position >= directions.counted[:, None, None])
    directions.sums.add_(((scale * new)[:, :, None] @ keys)[:, :, 0])
    along = (keys @ directions.sums[..., None])[..., 0] * scale
    return 1.0 - along / directions.sums.norm(dim=-1, keepdim=True).clamp_min(_LEAST_NORM)


def key_difference(rows: LayerRows) -> Tensor:
    """Return the minus the cosine of each key and the row's mean direction by plain torch: float32 [B, H, N]."""
    keys = rows.keys()
    scale = 1.0 / keys.norm(dim=-1).clamp_min(_LEAST_NORM)
    # Products avoid a normalized copy of all keys; the sum has the direction of the mean.
    anchor = scale[:, :, None] @ keys
    along = (keys @ anchor.mT)[..., 0] * scale
    return -along / anchor.norm(dim=-1).clamp_min(_LEAST_NORM)


_LEAST_NORM = 1e-12
