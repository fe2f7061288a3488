"""Eviction policies, composed of four choices."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from winnow.attention import AttentionObserver, Smoothing
from winnow.errors import ConfigError
from winnow.eviction.budgets import Budget, EqualHeads
from winnow.eviction.fit import Fit
from winnow.eviction.scores import Recency, Scorer


@dataclass(frozen=True)
class When:
    """The moments at which a sequence is evicted down to its budget. Several may be set; with none it never is."""

    after_prefill: bool = False
    """Once, when the prompt (or its part that `SamplingParams.context_tokens` names) is computed."""
    prefill_every: int | None = None
    """Within the prompt, before each further `prefill_every` tokens (Batch-Max Algorithm 1), so that it never has to
    fit whole."""
    prefill_compression: float | None = None
    """Tokens of the context for each KV that rounds within the prompt leave at least; None: these leave the budget."""
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
        if self.prefill_compression is not None:
            if not self.prefill_compression >= 1.0:
                raise ConfigError(f"prefill_compression must be at least 1, got {self.prefill_compression}")
            if self.prefill_every is None or self.within or not self.after_prefill:
                raise ConfigError("prefill_compression needs prefill_every and after_prefill, and no within")
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
        at_intervals = self.decode_every or self.every_steps or self.uncompressed_tokens
        return bool(at_intervals or self.pressure or self.join_prefill or self.make_room)

    @property
    def alone(self) -> "When":
        """The same without rounds that depend on other requests or on free memory."""
        return replace(self, pressure=False, join_prefill=False, make_room=False, late=False)


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
        if isinstance(self.recent, float):
            return int(self.recent * max(budget - self.sinks, 0))
        return self.recent


@dataclass(frozen=True)
class EvictionPolicy:
    """A scorer, a budget, protected KVs, and when rounds run.

    Example:
        >>> EvictionPolicy(score=KeyNorm(), budget=AdaptiveHeads(), keep=Keep(sinks=4), when=When(after_prefill=True))

    Raises:
        ConfigError: the choices are incompatible; the message says why.
    """

    score: Scorer = field(default_factory=Recency)
    budget: Budget = field(default_factory=EqualHeads)
    keep: Keep = field(default_factory=Keep)
    when: When = field(default_factory=When)
    compact: Fit | None = None
    """Fit the KVs that stay to what all of them gave; None: they stay as they are. Needs `kv_bias`."""

    def __post_init__(self) -> None:
        self._check_score()
        if self.compact is not None and self.score.replay is None:
            raise ConfigError(
                "compact fits what stays to the queries of a replay: it needs a score that has one, such as "
                f"Reconstruction, got {type(self.score).__name__}"
            )
        if self.when.within and self.budget.fixed is not None:
            raise ConfigError("within needs a budget of the request's own, and this one is fixed")

    def _check_score(self) -> None:
        when, window, every = self.when, self.score.window, self.when.prefill_every
        if window is not None and every is not None and window > every:
            raise ConfigError(
                f"the score observes the last {window} queries before a round, and prefill_every "
                f"has a round every {every} tokens: it must be at least {window}"
            )
        if self.score.replay is not None and (not when.after_prefill or when.in_prefill or when.in_decode):
            raise ConfigError(
                f"{type(self.score).__name__} repeats the context once all of it is there: it needs after_prefill, "
                "and takes no other rounds, since KVs that come later were not repeated"
            )
        if self.score.per_layer and not isinstance(self.budget, EqualHeads):
            raise ConfigError(
                f"{type(self.score).__name__} picks one token set per layer, "
                f"so the heads of a layer cannot keep different amounts as {type(self.budget).__name__} wants"
            )

    @property
    def owns_blocks(self) -> bool:
        """Return whether samples of one prompt need blocks of their own after it.

        Queries after the prompt change accumulators, and rounds move KVs; neither may affect another sample. Rounds
        that may never come copy what is shared when they do.
        """
        return (self.when.in_decode and not self.when.late) or self.observes[True] is not None

    @property
    def pool(self) -> Smoothing | None:
        pool = getattr(self.score, "pool", None)
        return pool if isinstance(pool, Smoothing) else None

    def with_pool(self, width: int, size: int | str | None = None) -> "EvictionPolicy":
        """Return the policy with its pooling in the model's tokens.

        Args:
            width: tokens that cover the text of 7 tokens in the papers.
            size: of all pooling, in place of the policy's: a number of tokens, or "text" for `width`; None: as it is.

        Raises:
            ConfigError: a size is given, and the score does not pool; or it is no odd number.
        """
        pool = self.pool
        if pool is None:
            if size is None:
                return self
            raise ConfigError(
                f"pool cannot be given: {type(self.score).__name__} pools no scores, got {size}"
            )
        if size is None and not pool.by_text:
            return self
        tokens = size if isinstance(size, int) else width
        try:
            pooled = replace(pool, size=tokens, by_text=False)
        except ValueError:
            raise ConfigError(f"pool must be an odd number of tokens, or text, got {size}") from None
        return replace(self, score=self.score.with_pool(pooled))

    @cached_property
    def observes(self) -> dict[bool, AttentionObserver | None]:
        """The attention observers, by whether they decode: the same objects for all sequences of a policy."""
        return {decoding: self.score.observe(decoding=decoding) for decoding in (False, True)}
