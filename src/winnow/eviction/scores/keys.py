"""Scorers that use keys alone, so that they hold for any later question."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.attention import Smoothing
from winnow.errors import ConfigError
from winnow.eviction.kernels import RowKernels, key_difference_kernel, pool_rows
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.signals import KeyDirections, Needs


@dataclass(frozen=True)
class Recency(Scorer):
    """The position; newer KVs stay (StreamingLLM)."""

    factors: ClassVar[bool] = False

    def score(self, rows: LayerRows) -> Tensor:
        return rows.position.float()


@dataclass(frozen=True)
class Random(Scorer):
    """A number drawn for each KV from the seed, its position, layer and head: the same in every batch."""

    seed: int = 0

    def score(self, rows: LayerRows) -> Tensor:
        head = rows.first_head + torch.arange(rows.position.shape[1], device=rows.position.device)
        x = (
            rows.position.long() * 0x9E3779B1
            + (rows.layer * 8191 + head[:, None]) * 0x85EBCA77
            + self.seed * 0xC2B2AE3D
        )
        for bits, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):  # Wang-style avalanche on 32 bits
            x = ((x ^ ((x & _MASK) >> bits)) * factor) & _MASK
        return (x >> 8).float() / 2**24


_MASK = 0xFFFFFFFF


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
        return Needs(rotation=True)

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
    keys = rows.unrotated_keys()
    scale = 1.0 / keys.norm(dim=-1).clamp_min(_LEAST_NORM)
    new = rows.valid & (rows.position >= directions.counted[:, None, None])
    directions.sums.add_(((scale * new)[:, :, None] @ keys)[:, :, 0])
    along = (keys @ directions.sums[..., None])[..., 0] * scale
    return 1.0 - along / directions.sums.norm(dim=-1, keepdim=True).clamp_min(_LEAST_NORM)


def key_difference(rows: LayerRows) -> Tensor:
    keys = rows.keys()
    scale = 1.0 / keys.norm(dim=-1).clamp_min(_LEAST_NORM)
    # Products avoid a normalized copy of all keys; the sum has the direction of the mean.
    anchor = scale[:, :, None] @ keys
    along = (keys @ anchor.mT)[..., 0] * scale
    return -along / anchor.norm(dim=-1).clamp_min(_LEAST_NORM)


_LEAST_NORM = 1e-12


@dataclass(frozen=True)
class Leverage(Scorer):
    """The ridge leverage score of a key among the row's keys, high for keys unlike the others.

    Keys are centred at the row's mean. With S the mean of their outer products, the score of a key x is
    x^T (S + ridge m I)^-1 x, where m is the mean eigenvalue of S. That is n times the leverage of x in a ridge
    regression on all n keys (Alaoui and Mahoney, "Fast randomized kernel ridge regression with statistical guarantees",
    2015); without the ridge it is the squared Mahalanobis distance from the mean. Leverage of keys as a score for KVs:
    Compactor (Chari and Van Durme 2025), which approximates it by random projections. Here it is exact.
    """

    ridge: float = 0.1
    """Relative to the mean eigenvalue. It bounds the condition number by 1 + head_dim / ridge, so that float32
    suffices, and damps directions in which keys hardly differ."""
    pool: Smoothing | None = None
    """Smoothing over neighbours, so that words of several tokens stay together."""
    unrotated: bool = False
    """Use unrotated keys, since rotation moves equal keys apart; computed by plain torch."""

    def __post_init__(self) -> None:
        if not self.ridge > 0.0:
            raise ConfigError(f"ridge must be above 0, got {self.ridge}")
        if self.pool is not None and (self.pool.per_query_head or self.pool.skip_window):
            raise ConfigError(
                "Leverage knows no queries: its pool takes neither per_query_head nor skip_window"
            )

    @property
    def needs(self) -> Needs:
        return Needs(rotation=self.unrotated)

    def score(self, rows: LayerRows) -> Tensor:
        kernels = None if self.unrotated else RowKernels.of(rows)
        if kernels is not None:
            score = kernels.leverage(self.ridge)
        else:
            keys = rows.unrotated_keys() if self.unrotated else rows.keys()
            score = ridge_leverage(keys, rows.valid, self.ridge)
        return score if self.pool is None else pool_rows(score, rows, self.pool)


def ridge_leverage(keys: Tensor, counted: Tensor, ridge: float) -> Tensor:
    """Return the leverage of the keys, float32 [B, H, N, d], among those `counted`, bool [B, H, N]: [B, H, N]."""
    count = counted.sum(dim=-1)[..., None, None].clamp_min(1)
    keys = keys.masked_fill(~counted[..., None], 0.0)
    centred = (keys - keys.sum(dim=2, keepdim=True) / count).masked_fill_(~counted[..., None], 0.0)
    moment = centred.mT @ centred / count
    spread = moment.diagonal(dim1=-2, dim2=-1)
    # Equal keys have no spread; their score is 0.
    spread += ridge * spread.mean(dim=-1, keepdim=True).clamp_min(_LEAST_SPREAD)
    # The inverse of a small matrix and one product are much faster than a triangular system for each key.
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return (centred @ inverse).mul_(centred).sum(dim=-1)


_LEAST_SPREAD = 1e-12
