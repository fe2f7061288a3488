"""Resolve the configuration of an engine or request to a policy, and the policy to one sequence."""

import math
from dataclasses import dataclass, replace
from typing import Any

from winnow.config import AUTO, COMPRESSING, EvictionConfig
from winnow.errors import ConfigError, InvalidRequestError
from winnow.eviction.budgets import AdaptiveRows
from winnow.eviction.policy import EvictionPolicy, Keep, When
from winnow.eviction.presets import KEYS, SEEN, SENTENCE, find_preset
from winnow.eviction.scores.base import Scorer
from winnow.eviction.sequence import SequenceEviction
from winnow.values.eviction_request import OWN_AMOUNT, Amount, EvictionRequest

OWN = "own"  # the name of policies that are not presets
PAPER_POOL = 7  # tokens over which SnapKV and KV-Compress pool scores


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model on which the choice of a policy depends.

    Attributes:
        text_pool: tokens of the model that cover the text of `PAPER_POOL` tokens in the papers.
        knows_rotation: how it rotates keys is known.
        num_rows: rows of a sequence from which policies evict; None: many.
        sparse_top_k: KVs that each token attends to, chosen of all by the model itself; None: it attends to all.
    """

    text_pool: int = PAPER_POOL
    knows_rotation: bool = True
    num_rows: int | None = None
    sparse_top_k: int | None = None

    @property
    def few_rows(self) -> bool:
        """Return whether a few rows carry all that is far away, as in models with windows in most layers."""
        return self.num_rows is not None and self.num_rows < _FEW_ROWS

    @property
    def auto_compression(self) -> float:
        """Most compression of `compression=auto`: it costs few answers (docs/results/known.md)."""
        return 4.0 if self.few_rows else 8.0


UNKNOWN_MODEL = ModelTraits()
_FEW_ROWS = 8
_DEFAULT_COMPRESSION = 4.0


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy with the amount that an engine or a request configures for it.

    Raises:
        ConfigError: an amount is given for a policy that does not take one.
    """

    name: str  # of the preset, or `OWN`
    policy: EvictionPolicy
    default_budget: int | None = None  # KVs per row that the preset's paper uses, if any
    amount: Amount = OWN_AMOUNT  # what is kept of a context
    kv_floor: int = 1  # as in `EvictionConfig`

    def __post_init__(self) -> None:
        if self.policy.budget.fixed is None or self.policy.when.never:
            return
        for field, amount in vars(self.amount).items():
            if amount is not None:
                raise ConfigError(f"{field} cannot be chosen: {self.name!r} decides itself how much it keeps")

    @property
    def takes_amount(self) -> bool:
        return not self.policy.when.never and self.policy.budget.fixed is None

    def budget(self, context_len: int) -> int:
        fixed = self.policy.budget.fixed
        if fixed is not None:
            return fixed
        if self.amount.kv_budget is not None:
            return self.amount.kv_budget
        compression = self.amount.compression
        if compression is None and self.default_budget is not None:
            return self.default_budget
        return max(self.kv_floor, math.ceil(context_len / (compression or _DEFAULT_COMPRESSION)))

    def for_prompt(
        self,
        prompt_len: int,
        num_tokens: int,
        request: EvictionRequest = EvictionRequest(),  # noqa: B008  # frozen
        *,
        may_idle: bool = True,
    ) -> SequenceEviction | None:
        """Bind the policy to one prompt. Returns None if it would never evict anything.

        Args:
            num_tokens: most tokens that will be computed, prompt included.
            request: what is known of the prompt, and which positions to protect. If the budget has no room for a
                template's tail, it is not protected; with an answer's prefix windows end with the prompt.
            may_idle: return None where the budget suffices for all tokens.

        Raises:
            InvalidRequestError: the budget is smaller than the protected set, or a span lies outside the context.
        """
        policy = self.policy
        if policy.when.never:
            return None
        context_len = prompt_len if request.context_tokens is None else request.context_tokens
        budget = self.budget(context_len)
        eviction = SequenceEviction(policy, budget, prompt_len, context_len, tuple(request.protect))
        if policy.when.prefill_compression is not None:
            eviction = replace(eviction, prefill_budget=eviction.at(policy.when.prefill_compression).budget)
        if may_idle and num_tokens <= (budget if policy.when.within else eviction.target):
            return None
        _check_spans(eviction)
        _check_room(eviction)
        tail = request.template_tail or 0
        if request.answer_prefix and policy.score.window is not None:
            tail = 0
        return _with_template(eviction, min(tail, prompt_len) - (prompt_len - context_len))


def resolve_policy(
    config: EvictionConfig, traits: ModelTraits = UNKNOWN_MODEL, *, asked_later: bool = False
) -> ResolvedPolicy:
    """Look up the policy that a configuration names, or take the one that it holds.

    Args:
        traits: of the model.
        asked_later: questions follow the context that is judged, so that a window cannot see them.

    Raises:
        ConfigError: there is no such policy, or an amount is given for one that takes none, or a pool for one that
            does not pool; or the model chooses KVs itself.
    """
    chosen = as_policy(config.chosen)
    if isinstance(chosen, EvictionPolicy):
        name, policy, default_budget = OWN, chosen, None
    elif isinstance(chosen, str):
        name = concrete_preset(chosen, traits, asked_later=asked_later)
        preset = find_preset(name)
        policy, default_budget = preset.policy, preset.kv_budget
    else:
        raise ConfigError(
            f"eviction must be a preset's name, an EvictionPolicy or a Scorer, got {type(chosen).__name__}"
        )
    if traits.sparse_top_k is not None and not policy.when.never:
        chooses = f"whose sparse attention chooses {traits.sparse_top_k} KVs among all"
        raise ConfigError(f"eviction must be none for a model {chooses}, got {name}")
    # Beside no eviction a pool is for the policies that requests bring.
    pool = None if policy.when.never else config.pool
    policy, amount = policy.with_pool(traits.text_pool, pool), config.amount
    if config.compression == AUTO:
        policy, amount = _late(name, policy), Amount(traits.auto_compression)
    return ResolvedPolicy(name, policy, default_budget, amount, config.kv_floor)


def as_policy(chosen: Any) -> Any:
    """Return the policy of a score, or of a class of scores, that stands alone: it chooses as SnapKV's does.

    All else is returned as it is.
    """
    if isinstance(chosen, type) and issubclass(chosen, Scorer):
        chosen = chosen()
    if not isinstance(chosen, Scorer):
        return chosen
    return EvictionPolicy(chosen, AdaptiveRows(), Keep(sinks=4, recent=16), When(after_prefill=True))


def concrete_preset(name: str, traits: ModelTraits = UNKNOWN_MODEL, *, asked_later: bool) -> str:
    """Return the preset that a name stands for: itself, but for `winnow`.

    Where the question is seen, that is its window by the sentence, times keys where there are many rows of them; where
    it comes later keys, and a replay for models whose rotation of keys is not known.
    """
    if name != COMPRESSING:
        return name
    if not asked_later:
        return SENTENCE if traits.few_rows or not traits.knows_rotation else SEEN
    return KEYS if traits.knows_rotation else "kvzip"


def _late(name: str, policy: EvictionPolicy) -> EvictionPolicy:
    """Return the policy with rounds where memory is short alone."""
    if policy.when.never:
        return policy
    if policy.score.replay is not None or policy.compact is not None:
        raise ConfigError(
            f"compression=auto compresses what runs once memory is short, and {name!r} judges right after the prompt: "
            "give a number"
        )
    return replace(policy, when=When(pressure=True, make_room=True, late=True))


def _with_template(eviction: SequenceEviction, tail: int) -> SequenceEviction:
    """Protect the tail of a template if policy and budget allow it."""
    policy = eviction.policy
    if tail <= 0 or not policy.score.before_template:
        return eviction
    span = (eviction.context_len - tail, eviction.context_len)
    kept = replace(eviction, spans=(*eviction.spans, span), template_tail=tail)
    return kept if kept.num_protected <= kept.target else eviction


def _check_room(eviction: SequenceEviction) -> None:
    if eviction.target < 1:
        raise InvalidRequestError(
            f"kv_budget must be above {eviction.policy.when.prefill_every} (prefill_every), the room for the tokens "
            f"to come that it includes, got {eviction.budget}"
        )
    if eviction.num_protected > eviction.target:
        raise InvalidRequestError(
            f"the budget of {eviction.target} KVs per row is smaller than the protected set of "
            f"{eviction.num_protected}: {eviction.policy.keep.sinks} sinks, {eviction.recent} recent"
            + (f", {len(eviction.spans)} spans" if eviction.spans else "")
        )


def _check_spans(eviction: SequenceEviction) -> None:
    for start, end in eviction.spans:
        if end > eviction.context_len:
            raise InvalidRequestError(
                f"protect must lie within the first {eviction.context_len} tokens of the prompt, got {start}..{end}"
            )
