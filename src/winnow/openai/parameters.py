"""Sampling parameters of one request: its own fields over the defaults."""

from collections.abc import Mapping
from typing import Any

from winnow.errors import WinnowError
from winnow.openai.errors import ApiError
from winnow.sampling import SamplingParams

# Keys of OpenAI bodies that say nothing about the answer.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})

# Keys that Winnow knows but does not serve, and the values that mean the same as leaving them out.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def sampling_from_fields(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from fields named like those of `SamplingParams`.

    Null stands for the default, except in `max_tokens`, where it lifts the limit.

    Raises:
        ApiError: an unknown key, or a value out of range.
    """
    own = {key: value for key, value in keys.items() if value is not None or key == "max_tokens"}
    try:
        return SamplingParams.from_mapping({**defaults, **own})
    except WinnowError as error:
        raise ApiError("invalid_request", str(error)) from error


def sampling_from_body(body: Mapping[str, Any], defaults: Mapping[str, Any], *, chat: bool) -> SamplingParams:
    """Sampling parameters under OpenAI's names, and under ours where OpenAI has none.

    Raises:
        ApiError: an unknown key, one that is not served, or a value out of range.
    """
    values = {key: value for key, value in body.items() if value is not None and key not in _IGNORED}
    for key, harmless in _UNSERVED.items():
        if key in values and values.pop(key) not in harmless:
            raise ApiError("unsupported_parameter", f"{key} is not supported")
    if chat:
        # OpenAI's own default: a chat answers until it is done.
        defaults = {"max_tokens": None, **defaults}
        limit = values.pop("max_completion_tokens", None)
        if limit is not None:
            values["max_tokens"] = limit
        wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise ApiError("invalid_request", f"logprobs must be true or false, got {wanted!r}")
        if top and not wanted:
            raise ApiError("invalid_request", "top_logprobs needs logprobs to be true")
        if wanted:
            values["logprobs"] = top
    return sampling_from_fields(values, defaults)
