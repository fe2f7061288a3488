"""The longest sequence that a model serves."""

from dataclasses import dataclass

from winnow.errors import ConfigError


@dataclass(frozen=True)
class ContextLimit:
    """What a model can do."""

    tokens: int | None
    """None: its configuration does not say."""
    reason: str
    """What sets the limit, or why there is none."""

    def take(self, wanted: int | None) -> int:
        """The longest sequence served, where `wanted` is what the user asks for.

        Raises:
            ConfigError: more is wanted than the model can do, or nothing is, and the model does not say what it can.
        """
        if wanted is None:
            if self.tokens is None:
                raise ConfigError(f"max_model_len must be given: {self.reason}")
            return self.tokens
        if self.tokens is not None and wanted > self.tokens:
            raise ConfigError(f"max_model_len must be at most {self.tokens}, {self.reason}, got {wanted}")
        return wanted
