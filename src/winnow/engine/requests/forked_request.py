"""A request that continues from where another one is: what it may change, and what it inherits."""

from dataclasses import replace

from winnow.engine.requests.request import Request, Sequence
from winnow.errors import InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.values.eviction_request import EVICTION_FIELDS

# What has shaped the KVs, or what has been reported, and so cannot change half-way.
_POLICY = EVICTION_FIELDS


def forked_params(parent: Sequence, params: SamplingParams | None) -> SamplingParams:
    """Return the parameters of a fork: `params` with what `parent`'s KVs depend on, or `parent`'s own.

    Raises:
        InvalidRequestError: `params` ask for something that cannot change; names field, value and limit.
    """
    request = parent.request
    inherited = _own_params(request, parent.index)
    if params is None:
        return replace(inherited, prompt_logprobs=None)
    name = request.request_id
    if params.n != 1:
        raise InvalidRequestError(f"n must be 1 for a fork, got {params.n}")
    if params.prompt_logprobs is not None:
        raise InvalidRequestError(
            f"prompt_logprobs must be left out for a fork of {name!r}, which computed the prompt, "
            f"got {params.prompt_logprobs}"
        )
    default = SamplingParams()
    for field in _POLICY:
        asked, given = getattr(params, field), getattr(inherited, field)
        if asked not in (getattr(default, field), given):
            raise InvalidRequestError(
                f"{field} must be that of {name!r}, whose KVs a fork shares, {given!r}, got {asked!r}"
            )
    if params.logprobs is not None and inherited.logprobs is None and parent.num_output_tokens:
        raise InvalidRequestError(
            f"logprobs must be left out for a fork of {name!r}, which has reported none so far, "
            f"got {params.logprobs}"
        )
    answered, forced = tuple(parent.output_token_ids), params.forced_for(0)
    if forced[: len(answered)] != answered[: len(forced)]:
        raise InvalidRequestError(
            f"forced_tokens must begin with the {len(answered)} tokens that {name!r} has answered, "
            f"got {list(forced)}"
        )
    return replace(params, **{field: getattr(inherited, field) for field in _POLICY})


def inherit(child: Request, parent: Sequence) -> None:
    """Give a fork its tokens, and the policy that its KVs have been under.

    Raises:
        InvalidRequestError: the policy would go another way with the fork's `max_tokens`, or the fork has its answer.
    """
    [sequence] = child.sequences
    name, answered = parent.request.request_id, parent.num_output_tokens
    if child.max_tokens <= answered:
        raise InvalidRequestError(
            f"max_tokens must be above the {answered} tokens that {name!r} has answered, got {child.max_tokens}"
        )
    if child.evictions != (parent.asked_eviction,):
        raise InvalidRequestError(
            f"max_tokens must be at most {parent.request.max_tokens}, that of {name!r}, whose policy does not "
            f"foresee a longer answer, got {child.max_tokens}"
            if parent.asked_eviction is None
            else f"max_tokens must be such that the policy of {name!r} evicts anything, got {child.max_tokens}"
        )
    sequence.token_ids, sequence.eviction = list(parent.token_ids), parent.eviction


def source_of(parent: Sequence) -> Sequence:
    """Return the sequence that holds a sample's KVs: the first sample, until the prompt is computed."""
    first = parent.request.sequences[0]
    return first if parent in first.forks else parent


def _own_params(request: Request, index: int) -> SamplingParams:
    """Return the parameters of one sample, as if it had been asked for alone."""
    params = request.params
    amount = vars(params.amounts[index]) if len(params.amounts) > 1 else {}
    return replace(params, n=1, forced_tokens=params.forced_for(index), **amount)
