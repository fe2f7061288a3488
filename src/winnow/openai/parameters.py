"""Sampling parameters of one request: its own fields over the defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from winnow.errors import WinnowError
from winnow.openai.errors import ApiError, invalid, unsupported
from winnow.sampling import SamplingParams
from winnow.values.json_values import json_kind

# Keys of OpenAI bodies that say nothing about the answer, and what they must be all the same: a body that is refused
# elsewhere is wrong here too.
_TEXTS = ("user", "service_tier", "safety_identifier", "verbosity", "request_id")
_IGNORED: Mapping[str, Any] = dict.fromkeys(_TEXTS, str) | {
    "metadata": dict,
    "prediction": dict,
    "store": bool,
}
VERBOSITIES = ("low", "medium", "high")
_KINDS = {str: "a text", dict: "an object", bool: "true or false"}

# Keys that Winnow knows but does not serve, and the values that mean the same as leaving them out.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "output_kind": (),
    "parallel_tool_calls": (True, False),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
_REASONS = {
    "cache_salt": "cache_salt is not taken from requests: the server derives it from the API key's tenant",
    "chat_template": "chat_template is not taken from requests: the model's own is used",
    "prompt_embeds": "prompt_embeds are not taken: send text or token ids",
    "truncate_prompt_tokens": "truncate_prompt_tokens is not supported: compression keeps long prompts small",
}


def sampling_from_fields(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Read parameters under the names of `SamplingParams`; null is the default, but lifts the limit of `max_tokens`."""
    own = {key: value for key, value in keys.items() if value is not None or key == "max_tokens"}
    try:
        return SamplingParams.from_mapping({**defaults, **own})
    except WinnowError as error:
        raise ApiError("invalid_request", str(error)) from error


def sampling_from_body(body: Mapping[str, Any], defaults: Mapping[str, Any], *, chat: bool) -> SamplingParams:
    """Read parameters under OpenAI's names, and under ours where it has none. Raises ApiError: one is not served."""
    values = {key: value for key, value in body.items() if value is not None}
    _take_ignored(values)
    for key, reason in _REASONS.items():
        if key in values:
            raise ApiError("unsupported_parameter", reason, key)
    for key, harmless in _UNSERVED.items():
        if key in values and values.pop(key) not in harmless:
            raise unsupported(key)
    response_format(values)
    if chat:
        # OpenAI's own default: a chat answers until it is done.
        defaults = {"max_tokens": None, **defaults}
        limit = values.pop("max_completion_tokens", None)
        if limit is not None:
            values["max_tokens"] = limit
        wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise invalid("logprobs", f"must be true or false, got {wanted!r}")
        if top and not wanted:
            raise invalid("top_logprobs", "needs logprobs to be true")
        if wanted:
            values["logprobs"] = top
    return sampling_from_fields(values, defaults)


def _take_ignored(values: dict[str, Any]) -> None:
    """Take fields that say nothing about the answer out of `values`. Raises ApiError: one is of a wrong kind."""
    for key, kind in _IGNORED.items():
        value = values.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise invalid(key, f"must be {_KINDS[kind]}, got {json_kind(value)}")
        if key == "verbosity" and value not in VERBOSITIES:
            raise invalid("verbosity", f"must be one of {', '.join(VERBOSITIES)}, got {value!r:.80}", key)
        if key == "metadata" and not all(isinstance(each, str) for each in value.values()):
            raise invalid("metadata", "must be an object of texts", key)


def response_format(values: dict[str, Any]) -> None:
    """Replace OpenAI's `response_format`, and vLLM's earlier `guided_*`, by `structured_outputs`."""
    found: list[dict[str, Any]] = []
    form = values.pop("response_format", None)
    if form is not None:
        found += _read_format(form, "response_format")
    for name in ("json", "regex", "choice", "grammar"):
        if (value := values.pop(f"guided_{name}", None)) is not None:
            found.append({name: value})
    if (own := values.get("structured_outputs")) is not None:
        found.append(own)
    if len(found) > 1:
        raise ApiError("invalid_request", "the form of the answer must be given once, got several")
    if found:
        values["structured_outputs"] = found[0]


def _read_format(form: Any, name: str) -> list[dict[str, Any]]:
    """Return what a `response_format` asks for; nothing for plain text.

    A schema may stand in `json_schema`, or beside the type, as the Responses API and llama.cpp's users write it.
    """
    given = (
        {key: value for key, value in form.items() if value is not None} if isinstance(form, Mapping) else {}
    )
    kind = given.pop("type", None)
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"{name}.type", f"must be text, json_object or json_schema, got {kind!r:.80}", name)
    described = given
    if kind == "json_schema" and "json_schema" in given:
        described = given.pop("json_schema")
        _refuse_fields(given, name, ())
        name += ".json_schema"
    if kind == "text" or (kind == "json_object" and "schema" not in given):
        _refuse_fields(given, name, ())
        return [] if kind == "text" else [{"json_object": True}]
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{name}.schema", f"must be an object, got {json_kind(schema)}", name)
    _refuse_fields(described, name, ("schema", "name", "description", "strict"))
    return [{"json": schema}]


def _refuse_fields(given: Mapping[str, Any], name: str, known: Sequence[str]) -> None:
    unknown = next((each for each in given if each not in known), None)
    if unknown is not None:
        raise invalid(name, f"has no field {unknown!r:.80}")
