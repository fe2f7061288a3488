"""Scorers that use attention weights."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from winnow.attention import AttentionObserver, Group, Smoothing, Term
from winnow.errors import ConfigError
from winnow.eviction.replay import Replay
from winnow.eviction.round_rows import LayerRows
from winnow.eviction.scores.base import Scorer


@dataclass(frozen=True)
class Window(Scorer):
    """Attention of the last queries before a round (SnapKV; KV-Compress eq. 7-11 with power 2)."""

    num_accumulators: ClassVar[int] = 1
    size: int = 32
    power: int = 1
    pool: Smoothing | None = None
    group: Group = Group.SUM
    continual: bool = False
    """Add the attention of queries after the prompt, not smoothed (KV-Compress eq. 20)."""
    skip_template: bool = False
    """End the window at the question's last token where a chat template follows it, and protect what follows; False: at
    the prompt's last token, as in the paper, which is better if the template ends with a prefix of the answer
    (measured in docs/eviction.md)."""

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

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class Cumulative(Scorer):
    """Attention of all queries so far (H2O; KV-Compress eq. 19 with power 2 and exclude_first 10)."""

    num_accumulators: ClassVar[int] = 1
    power: int = 1
    exclude_first: int = 0
    group: Group = Group.SUM

    def __post_init__(self) -> None:
        _check_power(self.power)

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((_TERM[self.power],), self.group, self.exclude_first)

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class Average(Cumulative):
    """Attention per query seen, so that old KVs gain nothing from their age alone (Batch-Max 3.2)."""

    def score(self, rows: LayerRows) -> Tensor:
        seen = rows.age() + (1 - self.exclude_first)
        return rows.accumulators[0] / seen.clamp_min_(1)


@dataclass(frozen=True)
class LastQuery(Scorer):
    """Attention of the last query alone, averaged over all heads of the layer (TOVA)."""

    num_accumulators: ClassVar[int] = 1
    per_layer: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return 1

    @property
    def before_template(self) -> bool:
        return False  # every later token is the last query in turn

    def observe(self, *, decoding: bool) -> AttentionObserver:
        return AttentionObserver((Term.ATTENTION,), Group.MEAN, replace=True)

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]


@dataclass(frozen=True)
class BelowAverage(Scorer):
    """Minus the count of queries that paid a KV less than the average, 1 / (KVs seen), in recent history
    (Scissorhands).

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

    def score(self, rows: LayerRows) -> Tensor:
        return -rows.accumulators[0]

    @property
    def resets_accumulators(self) -> bool:
        return True


_TERM = {1: Term.ATTENTION, 2: Term.SQUARED}


def _check_power(power: int) -> None:
    if power not in _TERM:
        raise ConfigError(f"power must be 1 or 2, got {power}")


@dataclass(frozen=True)
class Reconstruction(Scorer):
    """The largest attention that a KV receives from a replay of the context (KVzip, eq. 2)."""

    num_accumulators: ClassVar[int] = 1
    asked: Replay = field(default_factory=Replay)
    """Settings of the replay."""

    @property
    def replay(self) -> Replay:
        return self.asked

    def score(self, rows: LayerRows) -> Tensor:
        return rows.accumulators[0]
