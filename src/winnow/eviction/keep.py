"""Protected KVs."""

from dataclasses import dataclass

from winnow.errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """KVs that no round evicts, whatever their score.

    Spans of the request (`SamplingParams.protect`) are protected as well.
    """

    sinks: int = 0
    """Number of first positions to protect."""
    recent: int | float = 0
    """Number of last positions to protect; a float up to 1.0 is a share of the budget less the sinks."""

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"sinks must be at least 0, got {self.sinks}")
        if self.recent < 0 or (isinstance(self.recent, float) and self.recent > 1.0):
            raise ConfigError(f"recent must be a count, or a share between 0.0 and 1.0, got {self.recent}")

    def window(self, budget: int) -> int:
        """Return the number of last positions that are protected under a budget in KVs per row."""
        if isinstance(self.recent, float):
            return int(self.recent * max(budget - self.sinks, 0))
        return self.recent
