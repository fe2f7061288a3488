"""A score that is made from another one, and a sum of two."""

from dataclasses import dataclass, replace

from torch import Tensor

from winnow.attention import Observe
from winnow.errors import ConfigError
from winnow.eviction.replay import Replay
from winnow.eviction.rows import LayerRows
from winnow.eviction.scores.base import Score
from winnow.eviction.signals import Needs


@dataclass(frozen=True)
class DerivedScore(Score):
    """Watches and needs what the inner score does; a subclass says what worth is made of it."""

    score: Score

    @property
    def num_scores(self) -> int:  # type: ignore[override]
        return self.score.num_scores

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

    def observe(self, *, decoding: bool) -> Observe | None:
        return self.score.observe(decoding=decoding)

    @property
    def forgets(self) -> bool:
        return self.score.forgets


@dataclass(frozen=True)
class SumOfScores(DerivedScore):
    """score + weight * other, where the other reads stored keys and values alone."""

    other: Score
    weight: float = 1.0

    def __post_init__(self) -> None:
        other, name = self.other, type(self.other).__name__
        if other.num_scores or other.replay is not None or other.needs.queries:
            raise ConfigError(
                f"{name} watches attention: the second score of a sum reads keys and values alone"
            )
        if other.per_layer != self.score.per_layer:
            raise ConfigError(f"{name} and {type(self.score).__name__} do not share per_layer")
        if not self.weight > 0.0:
            raise ConfigError(f"weight must be above 0, got {self.weight}")

    @property
    def factors(self) -> bool:  # type: ignore[override]
        return self.score.factors and self.other.factors

    @property
    def needs(self) -> Needs:
        mine, others = self.score.needs, self.other.needs
        return replace(mine, rotation=mine.rotation or others.rotation, output=mine.output or others.output)

    def worth(self, rows: LayerRows) -> Tensor:
        return self.score.worth(rows) + self.weight * self.other.worth(rows)
