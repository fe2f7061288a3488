"""Times at which rounds of eviction run."""

from dataclasses import dataclass, replace

from winnow.errors import ConfigError


@dataclass(frozen=True)
class When:
    """The moments at which a sequence is evicted down to its budget. Several may be set; with none it never is."""

    after_prefill: bool = False
    """Once, when the prompt (or its part that `SamplingParams.context_tokens` names) is computed."""
    prefill_every: int | None = None
    """Within the prompt, before each further `prefill_every` tokens (Batch-Max Algorithm 1), so that it never has to
    fit whole."""
    decode_every: int | None = None
    """Tokens between rounds while decoding."""
    every_steps: int | None = None
    """Engine steps between rounds while decoding, all sequences at once (KV-Compress 4.2.3, approach 1)."""
    uncompressed_tokens: int | None = None
    """Rounds while decoding, once the running sequences together gained this many tokens since their last rounds
    (approach 2)."""
    pressure: bool = False
    """Rounds while decoding, when a sequence would otherwise be preempted (approach 4)."""
    join_prefill: bool = False
    """Rounds while decoding, in the round after a prompt that another sequence under the same policy has just finished
    (approach 3). The round includes all of them, those with the oldest last round first."""
    make_room: bool = False
    """Rounds while decoding, when that would admit a waiting request."""
    late: bool = False
    """Rounds under pressure and to make room go as far as memory asks, in steps (`SequenceEviction.at`), and those to
    make room run only where steps so far promise more throughput."""
    within: bool = False
    """The budget includes the tokens up to the next round: a round leaves room for `prefill_every` or `decode_every`
    tokens (Batch-Max). False: a round evicts down to the budget, and these tokens come on top."""

    def __post_init__(self) -> None:
        for name in ("prefill_every", "decode_every", "every_steps", "uncompressed_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.within and self.prefill_every is None:
            raise ConfigError("within needs prefill_every: it says how many tokens the budget has room for")
        if self.late and (self.after_prefill or self.in_prefill or not self.pressure):
            raise ConfigError(
                "late compresses where memory is short: it needs pressure, and no rounds of the prompt"
            )
        if self.join_prefill and not self.after_prefill:
            raise ConfigError(
                "join_prefill needs after_prefill: the round after a prompt is the one that is joined"
            )

    @property
    def never(self) -> bool:
        return not (self.after_prefill or self.in_prefill or self.in_decode)

    @property
    def in_prefill(self) -> bool:
        return self.prefill_every is not None

    @property
    def in_decode(self) -> bool:
        """Return whether rounds may run after the prompt."""
        at_intervals = self.decode_every or self.every_steps or self.uncompressed_tokens
        return bool(at_intervals or self.pressure or self.join_prefill or self.make_room)

    @property
    def alone(self) -> "When":
        """The same without rounds that depend on other requests or on free memory."""
        return replace(self, pressure=False, join_prefill=False, make_room=False, late=False)
