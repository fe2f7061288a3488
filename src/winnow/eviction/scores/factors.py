"""Scorers on top of another one: by the sentence, or times the size of a KV's contribution to the output."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from winnow.attention import AttentionObserver, Smoothing
from winnow.errors import ConfigError
from winnow.eviction.kernels import pool_rows
from winnow.eviction.replay import Replay
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer
from winnow.eviction.scores.keys import KeyDeviation
from winnow.eviction.signals import Needs
from winnow.eviction.text_units import Unit


@dataclass(frozen=True)
class Derived(Scorer):
    """A score from that of `inner`, to which all else is delegated."""

    inner: Scorer

    @property
    def num_accumulators(self) -> int:  # type: ignore[override]
        return self.inner.num_accumulators

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        return self.inner.per_layer

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    @property
    def window(self) -> int | None:
        return self.inner.window

    @property
    def replay(self) -> Replay | None:
        return self.inner.replay

    @property
    def before_template(self) -> bool:
        return self.inner.before_template

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        return self.inner.observe(decoding=decoding)

    @property
    def resets_accumulators(self) -> bool:
        return self.inner.resets_accumulators


@dataclass(frozen=True)
class BySentence(Derived):
    """The larger of a score, pooled over neighbours, and a share of the largest score within the KV's sentence.

    A question's attention falls on the first tokens of the fact that it asks for (docs/eviction.md).
    """

    share: float = 0.25
    unit: Unit = "sentence"
    pool: Smoothing | None = None
    """Takes the place of the inner scorer's, which must not pool: what is pooled leaves its sentence."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}")
        if getattr(self.inner, "pool", None) is not None or not self.inner.factors:
            raise ConfigError(
                f"{type(self.inner).__name__} pools, or may be below 0: BySentence pools itself"
            )
        if self.pool is not None and (self.pool.per_query_head or self.pool.skip_window):
            raise ConfigError("BySentence pools rows: its pool takes neither per_query_head nor skip_window")

    @property
    def needs(self) -> Needs:
        return replace(self.inner.needs, sentences=True)

    def score(self, rows: LayerRows) -> Tensor:
        score = self.inner.score(rows)
        pooled = score if self.pool is None else pool_rows(score, rows, self.pool)
        unit, valid = rows.text_unit(self.unit), score.masked_fill(~rows.valid, 0.0)
        # A text has no more sentences than positions, but a row may hold fewer KVs than that.
        largest = score.new_zeros((*score.shape[:2], rows.round.num_positions))
        largest.scatter_reduce_(2, unit, valid, "amax")
        return torch.maximum(pooled, largest.gather(2, unit).mul_(self.share))


@dataclass(frozen=True)
class Factor(Derived):
    """(inner score + epsilon)^power times a factor of each KV."""

    epsilon: float = 0.0
    """Added to the score, so that KVs with equal scores are ordered by the factor. Attention is about 1 / tokens
    each."""
    power: float = 1.0
    """Exponent of the score; below 1 the factor counts for more."""

    def __post_init__(self) -> None:
        if not self.inner.factors:
            name = type(self.inner).__name__
            raise ConfigError(f"{name} may be below 0 or is no amount: it cannot be multiplied")
        if not self.epsilon >= 0.0:
            raise ConfigError(f"epsilon must be at least 0, got {self.epsilon}")
        if not self.power > 0.0:
            raise ConfigError(f"power must be above 0, got {self.power}")

    @property
    def pool(self) -> Smoothing | None:
        return getattr(self.inner, "pool", None)

    def with_pool(self, pool: Smoothing) -> "Factor":
        return replace(self, inner=self.inner.with_pool(pool))

    def score(self, rows: LayerRows) -> Tensor:
        score = self.inner.score(rows) + self.epsilon
        return (score if self.power == 1.0 else score**self.power) * self.factor(rows)

    @abstractmethod
    def factor(self, rows: LayerRows) -> Tensor:
        """Return the factor of each KV, float32 [B, H, N], at least 0."""


@dataclass(frozen=True)
class ByValueNorm(Factor):
    """A score times the Euclidean norm of the value, since small values hardly change outputs."""

    def factor(self, rows: LayerRows) -> Tensor:
        return rows.values().norm(dim=-1)


@dataclass(frozen=True)
class ByKeyDeviation(Factor):
    """A score times `KeyDeviation`: what attention asks for, of keys that are unlike the others."""

    power: float = 0.5

    @property
    def needs(self) -> Needs:
        return replace(self.inner.needs, rotation=True)

    def factor(self, rows: LayerRows) -> Tensor:
        return KeyDeviation().score(rows).clamp_min_(0.0)


@dataclass(frozen=True)
class KeysWithin(Derived):
    """`KeyDeviation` in rounds within the prompt, when the question is still to come; else a score that knows it."""

    @property
    def needs(self) -> Needs:
        return replace(self.inner.needs, rotation=True)

    def score(self, rows: LayerRows) -> Tensor:
        within = rows.round.within
        if not any(within):
            return self.inner.score(rows)
        keys = KeyDeviation().score(rows)
        if all(within):
            return keys
        return torch.where(
            torch.tensor(within, device=keys.device)[:, None, None], keys, self.inner.score(rows)
        )
