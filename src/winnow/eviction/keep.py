"""What may never go."""

from dataclasses import dataclass

from winnow.errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """KVs that survive every round, whatever their score.

    Spans that a request marks (`SamplingParams.protect`) are kept besides.
    """

    sinks: int = 0
    """KVs of the first so many positions."""
    recent: int | float = 0
    """KVs of the last so many positions; below 1.0 or equal: this share of the budget that the sinks leave."""

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"sinks must be at least 0, got {self.sinks}")
        if self.recent < 0 or (isinstance(self.recent, float) and self.recent > 1.0):
            raise ConfigError(f"recent must be a count, or a share between 0.0 and 1.0, got {self.recent}")

    def window(self, budget: int) -> int:
        """How many of the last positions are kept under a budget of so many KVs per row."""
        if isinstance(self.recent, float):
            return int(self.recent * max(budget - self.sinks, 0))
        return self.recent
