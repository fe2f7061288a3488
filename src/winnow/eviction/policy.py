"""Eviction policies, composed of four choices."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from winnow.attention import AttentionObserver, Smoothing
from winnow.errors import ConfigError
from winnow.eviction.budgets import Budget, EqualHeads
from winnow.eviction.fit import Fit
from winnow.eviction.keep import Keep
from winnow.eviction.scores import Recency, Scorer
from winnow.eviction.when import When


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
        self._check_compact()
        if self.when.within and self.budget.fixed is not None:
            raise ConfigError("within needs a budget of the request's own, and this one is fixed")

    def _check_score(self) -> None:
        window, every = self.score.window, self.when.prefill_every
        if window is not None and every is not None and window > every:
            raise ConfigError(
                f"the score observes the last {window} queries before a round, and prefill_every "
                f"has a round every {every} tokens: it must be at least {window}"
            )
        if self.score.replay is not None:
            self._check_replay()
        if self.score.per_layer and not isinstance(self.budget, EqualHeads):
            raise ConfigError(
                f"{type(self.score).__name__} picks one token set per layer, "
                f"so the heads of a layer cannot keep different amounts as {type(self.budget).__name__} wants"
            )

    def _check_replay(self) -> None:
        when = self.when
        if not when.after_prefill or when.in_prefill or when.in_decode:
            raise ConfigError(
                f"{type(self.score).__name__} repeats the context once all of it is there: it needs after_prefill, "
                "and takes no other rounds, since KVs that come later were not repeated"
            )

    def _check_compact(self) -> None:
        if self.compact is None:
            return
        if self.score.replay is None:
            raise ConfigError(
                "compact fits what stays to the queries of a replay: it needs a score that has one, such as "
                f"Reconstruction, got {type(self.score).__name__}"
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
        """Pooling of neighbours' scores; None: it does not."""
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
