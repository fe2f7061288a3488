"""From what engine and request ask for to a policy with numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace

from winnow.config import EvictionConfig
from winnow.errors import ConfigError, InvalidRequestError
from winnow.eviction.policy import EvictionPolicy
from winnow.eviction.presets import Preset, find_preset
from winnow.eviction.sequence import SequenceEviction

_DEFAULT_COMPRESSION = 4.0


def preset_of(eviction: object) -> Preset:
    """The preset that a name stands for, or a policy as one.

    Raises:
        ConfigError: neither.
    """
    if isinstance(eviction, EvictionPolicy):
        return Preset(eviction, "")
    if isinstance(eviction, str):
        return find_preset(eviction)
    raise ConfigError(f"eviction must be a preset's name or an EvictionPolicy, got {type(eviction).__name__}")


def settle(
    config: EvictionConfig,
    prompt_len: int,
    num_tokens: int,
    context_len: int | None = None,
    spans: Sequence[tuple[int, int]] = (),
    template_tail: int = 0,
    *,
    may_idle: bool = True,
) -> SequenceEviction | None:
    """The policy of `config` for one prompt, or None if it would never take anything.

    Args:
        num_tokens: most tokens that will be computed, prompt included.
        context_len: tokens of the prompt that its rounds see; None: all.
        spans: positions to protect, half-open.
        template_tail: tokens at the prompt's end that follow the question. Where the budget has no room for them they
            count as any other.
        may_idle: return None where the budget suffices for all tokens.

    Raises:
        ConfigError: no such policy, or a budget where the policy takes none.
        InvalidRequestError: the budget is smaller than what is protected, or a span lies outside the context.
    """
    preset = preset_of(config.chosen)
    policy = preset.policy
    if policy.when.never:
        return None
    context_len = prompt_len if context_len is None else context_len
    budget = _budget(config, preset, context_len)
    eviction = SequenceEviction(policy, budget, prompt_len, context_len, tuple(spans))
    if (
        may_idle
        and policy.budget.bounded
        and num_tokens <= (budget if policy.when.within else eviction.target)
    ):
        return None
    _check_spans(eviction)
    if _includes_protected(policy):
        _check_room(eviction)
    return _with_template(eviction, min(template_tail, prompt_len) - (prompt_len - context_len))


def _with_template(eviction: SequenceEviction, tail: int) -> SequenceEviction:
    """The same with the tail of a template kept, where policy and budget allow it."""
    policy = eviction.policy
    if tail <= 0 or not policy.score.before_template or policy.reassign_positions:
        return eviction
    span = (eviction.context_len - tail, eviction.context_len)
    kept = replace(eviction, spans=(*eviction.spans, span), template_tail=tail)
    return kept if kept.num_protected <= kept.target or not _includes_protected(policy) else eviction


def _includes_protected(policy: EvictionPolicy) -> bool:
    """Whether what is protected counts towards the budget; else it is kept besides."""
    return policy.budget.fixed is None or policy.budget.bounded


def _budget(config: EvictionConfig, preset: Preset, context_len: int) -> int:
    fixed = preset.policy.budget.fixed
    if fixed is not None:
        if config.compression is not None or config.kv_budget is not None:
            asked = "compression" if config.kv_budget is None else "kv_budget"
            raise ConfigError(f"{asked} cannot be chosen: {config.chosen!r} decides itself how much it keeps")
        return fixed
    if config.kv_budget is not None:
        return config.kv_budget
    if config.compression is None and preset.kv_budget is not None:
        return preset.kv_budget
    compression = config.compression or _DEFAULT_COMPRESSION
    return max(config.kv_floor, math.ceil(context_len / compression))


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
    if eviction.spans and eviction.policy.reassign_positions:
        raise InvalidRequestError(
            "protect names positions, and this policy re-assigns them: it cannot keep spans"
        )
