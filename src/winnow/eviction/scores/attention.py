"""Scores that listen to attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from winnow.attention import AttentionObserver, Group, Smoothing, Term
from winnow.errors import ConfigError
from winnow.eviction.ranking import ranks
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score


@dataclass(frozen=True)
class Window(Score):
    """Attention of the last queries before a round (SnapKV; KV-Compress eq. 7-11 with power 2)."""

    num_accumulators: ClassVar[int] = 1
    size: int = 32
    power: int = 1
    pool: Smoothing | None = None
    group: Group = Group.SUM
    continual: bool = False
    """Add what the queries after the prompt pay, unpooled (KV-Compress eq. 20)."""
    skip_template: bool = False
    """Count the window back from the question's last token, where a chat template follows it, and keep what follows;
    False: from the prompt's last token, as in the paper. A prefix of the answer tells best what is looked for:
    docs/eviction.md has the measurement."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size of a window must be at least 1, got {self.size}")
        _check_power(self.power)

    @property
    def window(self) -> int:
        return self.size

    @property
    def before_template(self) -> bool:
        return self.skip_template

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        if decoding:
            return AttentionObserver((_TERM[self.power],), self.group) if self.continual else None
        return AttentionObserver((_TERM[self.power],), self.group, replace=True, smoothing=self.pool)

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class Cumulative(Score):
    """Attention of all queries so far (H2O; KV-Compress eq. 19 with power 2 and exclude_first 10)."""

    num_accumulators: ClassVar[int] = 1
    power: int = 1
    exclude_first: int = 0
    group: Group = Group.SUM

    def __post_init__(self) -> None:
        _check_power(self.power)

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((_TERM[self.power],), self.group, self.exclude_first)

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class Average(Cumulative):
    """Attention per query seen, which takes away what old KVs have for their age alone (Batch-Max 3.2)."""

    def worth(self, rows: LayerRows) -> Tensor:
        seen = rows.age() + (1 - self.exclude_first)
        return rows.accumulators[0] / seen.clamp_min_(1)


@dataclass(frozen=True)
class MeanDeviation(Score):
    """Mean attention, and steady low attention goes first (RoCo, EasyKV).

    Of a row's n unprotected KVs, so many have the right to go as the budget would keep, or as must go if that is more:
    those whose attention deviates least. Among them the lowest mean goes first. Needs the same budget in every row.
    """

    factors: ClassVar[bool] = False
    num_accumulators: ClassVar[int] = 2
    group: Group = Group.MEAN

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((Term.ATTENTION, Term.GROUP_SQUARED), self.group)

    def worth(self, rows: LayerRows) -> Tensor:
        seen = (rows.age() + 1).clamp_min(1)
        mean = rows.accumulators[0] / seen
        deviation = (rows.accumulators[1] / seen - mean.square()).clamp_min(0.0).sqrt()
        return torch.where(self._may_go(rows, deviation), mean, mean + _ABOVE_ANY_MEAN)

    def _may_go(self, rows: LayerRows, deviation: Tensor) -> Tensor:
        free = rows.valid & ~rows.protected
        kept = rows.protected.sum(dim=-1)
        budget = rows.round.budget[:, None]
        count = torch.maximum(budget - kept, rows.length - budget)
        return ranks(deviation.masked_fill(~free, torch.inf)) < count[..., None]


# Group sums of mean attention stay far below.
_ABOVE_ANY_MEAN = 1e6


@dataclass(frozen=True)
class LastQuery(Score):
    """Attention of the last query alone, averaged over all heads of the layer (TOVA)."""

    num_accumulators: ClassVar[int] = 1
    per_layer: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return 1

    @property
    def before_template(self) -> bool:
        return False  # every token that follows is its last query in turn

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((Term.ATTENTION,), Group.MEAN, replace=True)

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class BelowAverage(Score):
    """How rarely a KV got less than the average attention, 1 / (KVs seen), in recent history (Scissorhands).

    History: the last `history` queries of the prompt, then all queries since the last round.
    """

    factors: ClassVar[bool] = False
    num_accumulators: ClassVar[int] = 1
    history: int = 400
    group: Group = Group.SUM

    @property
    def window(self) -> int:
        return self.history

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((Term.BELOW_AVERAGE,), self.group, replace=not decoding)

    def worth(self, rows: LayerRows) -> Tensor:
        return -rows.accumulators[0]

    @property
    def forgets(self) -> bool:
        return True


@dataclass(frozen=True)
class ValueAware(Score):
    """How far the outputs of the last queries would move without the KV: (p / (1 - p))^2 |v - o|^2 (DropKV)."""

    num_accumulators: ClassVar[int] = 1
    size: int = 32
    pool: Smoothing | None = None
    group: Group = Group.SUM
    continual: bool = False
    skip_template: bool = False
    """Count the window back from the question's last token, where a chat template follows it, and keep what follows;
    False: from the prompt's last token, as in the paper. A prefix of the answer tells best what is looked for:
    docs/eviction.md has the measurement."""

    @property
    def window(self) -> int:
        return self.size

    @property
    def before_template(self) -> bool:
        return self.skip_template

    def observe(self, *, decoding: bool) -> AttentionObserver | None:
        if decoding:
            return AttentionObserver((Term.VALUE_AWARE,), self.group) if self.continual else None
        return AttentionObserver((Term.VALUE_AWARE,), self.group, replace=True, smoothing=self.pool)

    def worth(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


_TERM = {1: Term.ATTENTION, 2: Term.SQUARED}


def _check_power(power: int) -> None:
    if power not in _TERM:
        raise ConfigError(f"power must be 1 or 2, got {power}")
