"""Scores that multiply another one by what a KV adds when it is attended to."""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from winnow.attention import AttentionObserver
from winnow.errors import ConfigError
from winnow.eviction.replay import Replay
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class Factor(Score):
    """(score + epsilon) times a factor of each KV. Everything else is the inner score's."""

    score: Score
    epsilon: float = 0.0
    """Added to the score, so that KVs that it does not tell apart go by the factor. Scores of attention are shares of
    about 1 / tokens each."""

    def __post_init__(self) -> None:
        if not self.score.factors:
            raise ConfigError(
                f"{type(self.score).__name__} may be below 0 or is no amount: it cannot be multiplied"
            )
        if not self.epsilon >= 0.0:
            raise ConfigError(f"epsilon must be at least 0, got {self.epsilon}")

    @property
    def num_accumulators(self) -> int:  # type: ignore[override]
        return self.score.num_accumulators

    @property
    def per_layer(self) -> bool:  # type: ignore[override]
        return self.score.per_layer

    @property
    def needs(self) -> Needs:
        return self.score.needs

    @property
    def window(self) -> int | None:
        return self.score.window

    @property
    def replay(self) -> Replay | None:
        return self.score.replay

    @property
    def before_template(self) -> bool:
        return self.score.before_template

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        return self.score.observe(decoding=decoding)

    @property
    def forgets(self) -> bool:
        return self.score.forgets

    def worth(self, rows: LayerRows) -> Tensor:
        return (self.score.worth(rows) + self.epsilon) * self.factor(rows)

    @abstractmethod
    def factor(self, rows: LayerRows) -> Tensor:
        """Float32 [B, H, N], at least 0."""


@dataclass(frozen=True)
class ByValueNorm(Factor):
    """A score times the Euclidean norm of the value: what is small changes no output, however it is attended to."""

    def factor(self, rows: LayerRows) -> Tensor:
        return rows.values().norm(dim=-1)


@dataclass(frozen=True)
class ByOutputNorm(Factor):
    """A score times the sum of |W v|, with W what a query head's output is projected by; the mean over the group.

    The second stage of CriticalKV (Feng et al. 2025), for all KVs: the first one, which gives half of the budget to the
    plain score, is left out.
    """

    epsilon: float = 1e-4

    @property
    def needs(self) -> Needs:
        return replace(self.score.needs, output=True)

    def factor(self, rows: LayerRows) -> Tensor:
        values, weights = rows.values(), rows.output_weights()
        heads = values.shape[1]
        group = len(weights) // heads
        norms = torch.zeros_like(values[..., 0])
        for head in range(heads):  # outputs are much longer than values, so few are held at a time
            for weight in weights[head * group : (head + 1) * group]:
                norms[:, head] += (values[:, head] @ weight.float()).abs().sum(dim=-1)
        return norms / group
