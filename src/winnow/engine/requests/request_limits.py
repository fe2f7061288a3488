"""What a request may ask: of a model, of words and pictures in its prompt, and of another one that it forks."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import numpy as np

from winnow.engine.requests.request import Request, Sequence
from winnow.errors import ContextLengthError, InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.sampling.token_table import TokenTable
from winnow.values.checks import require
from winnow.values.eviction_request import EVICTION_FIELDS, Protected
from winnow.values.images import PromptImage


def forked_params(parent: Sequence, params: SamplingParams | None) -> SamplingParams:
    """Return the parameters of a fork: `params` with what `parent`'s KVs depend on, or `parent`'s own. Raises
    InvalidRequestError: `params` ask for something that cannot change; names field, value and limit."""
    request = parent.request
    # Those of the sample, as if it had been asked for alone.
    own, index = request.params, parent.index
    amount = vars(own.amounts[index]) if len(own.amounts) > 1 else {}
    inherited = replace(own, n=1, forced_tokens=own.forced_for(index), **amount)
    if params is None:
        return replace(inherited, prompt_logprobs=None)
    name = request.request_id
    require(params.n == 1, "n", "1 for a fork", params.n, InvalidRequestError)
    computed = f"left out for a fork of {name!r}, which computed the prompt"
    asked = params.prompt_logprobs
    require(asked is None, "prompt_logprobs", computed, asked, InvalidRequestError)
    default = SamplingParams()
    for field in EVICTION_FIELDS:  # these have shaped the KVs, and so cannot change half-way
        asked, given = getattr(params, field), getattr(inherited, field)
        if asked not in (getattr(default, field), given):
            raise InvalidRequestError(
                f"{field} must be that of {name!r}, whose KVs a fork shares, {given!r}, got {asked!r}"
            )
    missing = params.logprobs is not None and inherited.logprobs is None and parent.num_output_tokens > 0
    reported = f"left out for a fork of {name!r}, which has reported none so far"
    require(not missing, "logprobs", reported, params.logprobs, InvalidRequestError)
    # No KV of the token sampled last is computed: another may take its place.
    answered, forced = tuple(parent.output_token_ids), params.forced_for(0)
    known = answered if len(forced) < len(answered) else answered[:-1]
    if forced[: len(known)] != known[: len(forced)]:
        raise InvalidRequestError(
            f"forced_tokens must begin with the {len(known)} tokens of {name!r} that are computed, got {list(forced)}"
        )
    known_logprob = (
        params.logprobs is None or known == answered or forced[len(known)] in (parent.logprobs[-1] or ())
    )
    among = f"left out, or forced_tokens among those that {name!r} has reported"
    require(known_logprob, "logprobs", among, params.logprobs, InvalidRequestError)
    return replace(params, **{field: getattr(inherited, field) for field in EVICTION_FIELDS})


def inherit(child: Request, parent: Sequence) -> None:
    """Give a fork its tokens, and the policy that its KVs have been under. Raises InvalidRequestError: the policy would
    go another way with the fork's `max_tokens`, or the fork has its answer."""
    [sequence] = child.sequences
    name, answered = parent.request.request_id, parent.num_output_tokens
    most = f"above the {answered} tokens that {name!r} has answered"
    require(child.max_tokens > answered, "max_tokens", most, child.max_tokens, InvalidRequestError)
    if child.evictions != (parent.asked_eviction,):
        raise InvalidRequestError(
            f"max_tokens must be at most {parent.request.max_tokens}, that of {name!r}, whose policy does not "
            f"foresee a longer answer, got {child.max_tokens}"
            if parent.asked_eviction is None
            else f"max_tokens must be such that the policy of {name!r} evicts anything, got {child.max_tokens}"
        )
    sequence.token_ids, sequence.eviction = list(parent.token_ids), parent.eviction
    forced = child.params.forced_for(0)[:answered]
    sequence.token_ids[parent.prompt_len : parent.prompt_len + len(forced)] = forced


def check_tokens(token_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError: the prompt is empty, or the model does not have a token of it or of the parameters."""
    if not token_ids:
        raise InvalidRequestError("prompt must hold at least 1 token, got none")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"prompt token ids must be between 0 and {vocab_size - 1}, got {wrong}")
    params.validate_for(vocab_size)


def answer_limit(prompt_len: int, params: SamplingParams, context: int) -> int:
    """Return the limit of an answer's tokens: `max_tokens`, or the room in the context if that is less. Raises
    ContextLengthError: no room for an answer, or not for the tokens that it must begin with."""
    if prompt_len >= context:
        raise ContextLengthError(
            f"prompt must be shorter than the context of {context} tokens (max_model_len), got {prompt_len}"
        )
    if prompt_len + params.num_forced > context:
        raise ContextLengthError(
            f"prompt and forced_tokens must fit into the context of {context} tokens (max_model_len), "
            f"got {prompt_len} and {params.num_forced}"
        )
    wanted = context - prompt_len if params.max_tokens is None else params.max_tokens
    return min(wanted, context - prompt_len)


def with_spans(
    params: SamplingParams, token_ids: list[int], images: tuple[PromptImage, ...], tokens: TokenTable | None
) -> SamplingParams:
    """Return parameters whose `protect` has positions alone, those of the context. Raises InvalidRequestError: the
    prompt has no pictures, or not those words."""
    if not any(isinstance(each, Protected) for each in params.protect):
        return params
    found: list[tuple[int, int]] = []
    end = len(token_ids) if params.context_tokens is None else params.context_tokens
    for each in params.protect:
        if not isinstance(each, Protected):
            found.append(each)
            continue
        if each.text is None:
            spans: Iterable[tuple[int, int]] = [image.span for image in images]
        else:
            spans = _spans_of(each.text, token_ids, tokens)
        if not spans:
            what = "images" if each.text is None else f"text {each.text!r}"
            raise InvalidRequestError(f"protect names {what}, and the prompt has none")
        found += [(first, min(last, end)) for first, last in spans if first < end]
    return replace(params, protect=tuple(found))


def _spans_of(text: str, token_ids: list[int], tokens: TokenTable | None) -> list[tuple[int, int]]:
    """Return the tokens, half-open, of each place where a text stands."""
    if tokens is None:
        raise InvalidRequestError("protect names text, and the model's directory has no tokenizer")
    pieces = [tokens.bytes_of(token, first=not index) for index, token in enumerate(token_ids)]
    ends = np.fromiter(accumulate(map(len, pieces)), dtype=np.int64)
    whole, wanted = b"".join(pieces), text.encode()
    spans, at = [], whole.find(wanted)
    while at >= 0:
        first, last = np.searchsorted(ends, (at, at + len(wanted) - 1), side="right").tolist()
        spans.append((first, last + 1))
        at = whole.find(wanted, at + 1)
    return spans
