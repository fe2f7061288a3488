"""One line of the input, understood: a request, or what is wrong with it.

`winnow run --help` says which forms lines have; beside a prompt a flat line may have `multi_modal_data`, as in vLLM.
Any key that is neither known nor a sampling parameter is refused, since an ignored typo would change answers unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow.batch.reader import MAX_LINE_BYTES, RawLine
from winnow.openai.errors import ApiError, invalid
from winnow.openai.parameters import sampling_from_fields
from winnow.openai.request import (
    CompletionRequest,
    Endpoint,
    read_body,
    read_messages,
    read_priority,
    read_prompt,
    take_text,
)
from winnow.prompt.messages import MarkedText
from winnow.prompt.prompts import Prompt
from winnow.values.json_values import json_kind, parse_strict
from winnow.values.units import format_bytes


@dataclass(frozen=True)
class Job:
    """A line that can be handed to the engine.

    Attributes:
        endpoint: OpenAI's, which a Batch line names; None: the line is flat.
        asked: what it asks, with one prompt or messages.
        carried: keys that come back in the record.
    """

    index: int
    number: int
    endpoint: Endpoint | None
    asked: CompletionRequest
    carried: Mapping[str, Any]
    tenant: str | None = None


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run; what it holds is as in `Job`."""

    index: int
    number: int
    endpoint: Endpoint | None
    error: ApiError
    carried: Mapping[str, Any]


DEFAULT_METRIC = "exact"
# Those that compare with one reference, and need neither class names nor a package of their own.
METRICS = (DEFAULT_METRIC, "rouge-l", "qa-f1", "match-all")

_BATCH_KEYS = ("method", "url", "body")
_IMAGES = "multi_modal_data"
_FLAT_CARRIED = ("custom_id", "id", "reference", "category", "metric", "metadata", "return_kept")
_BATCH_CARRIED = ("custom_id", "reference", "category", "metric", "metadata")


def parse_line(
    raw: RawLine, defaults: Mapping[str, Any], *, accounts: bool = False, context_field: str | None = None
) -> Job | BadLine:
    """Read a line; `defaults` are the sampling parameters of lines that do not say. With `accounts` lines may say on
    whose account they run, and how urgent they are. A flat line's `context_field` is a document that stands before its
    prompt, or its first user message, and is judged without that."""
    carried = dict[str, Any]()
    # Of a line that may be unreadable, so that its error record fits its neighbours.
    found = raw.data or b""
    endpoint = Endpoint.COMPLETION if b'"url"' in found and b'"body"' in found else None
    try:
        line = _load(raw.data)
        endpoint = _endpoint_of(line) if any(key in line for key in _BATCH_KEYS) else None
        # Taken before anything is checked, so that an error record can name its request.
        keys = _FLAT_CARRIED if endpoint is None else _BATCH_CARRIED
        carried = {key: line[key] for key in keys if key in line}
        _check_carried(carried, endpoint)
        tenant = _take_tenant(line) if accounts else None
        if endpoint is None:
            context = None if context_field is None else take_text(line, context_field)
            asked = _read_flat(line, defaults, context, accounts=accounts)
        else:
            for key in line:
                if key not in (*_BATCH_KEYS, *_BATCH_CARRIED):
                    raise ApiError("unknown_parameter", f"unknown key {key!r}")
            asked = read_batch_line(line, defaults)
        return Job(raw.index, raw.number, endpoint, asked, carried, tenant)
    except Exception as error:
        return BadLine(raw.index, raw.number, endpoint, ApiError.wrap(error), carried)


def _read_flat(
    line: dict[str, Any], defaults: Mapping[str, Any], context: str | None, *, accounts: bool
) -> CompletionRequest:
    priority = line.pop("priority", None) if accounts else None
    if ("prompt" in line) == ("messages" in line):
        raise ApiError("invalid_request", "a line needs either prompt or messages")
    others = {"prompt", "messages", _IMAGES, *_FLAT_CARRIED}
    params = sampling_from_fields({key: value for key, value in line.items() if key not in others}, defaults)
    prompt: Prompt | None = read_prompt(line["prompt"]) if "prompt" in line else None
    messages = read_messages(line["messages"]) if "messages" in line else None
    if context:
        asked = next((each for each in messages or () if each["role"] == "user"), {"content": prompt})
        if not isinstance(asked["content"], str):
            raise ApiError(
                "invalid_request", "a context needs a prompt or a user's message of text behind it"
            )
        asked["content"] = MarkedText(f"{context}\n\n{asked['content']}", len(context))
        prompt = None if messages else asked["content"]
    if line.get(_IMAGES) is not None:
        if prompt is None:
            raise invalid(_IMAGES, "goes with a prompt: messages have parts")
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, _IMAGES: line[_IMAGES]}
    prompts = () if prompt is None else (prompt,)
    urgency = 0 if priority is None else read_priority(priority)
    return CompletionRequest(prompts, messages, params, None, priority=urgency)


def read_batch_line(line: Mapping[str, Any], defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read what a line of OpenAI's form asks; `defaults` are the sampling parameters of bodies that do not set them."""
    if not line.get("custom_id"):
        raise ApiError("invalid_request", "custom_id must be a text that is not empty")
    if line.get("method") != "POST":
        raise ApiError("invalid_request", f"method must be POST, got {line.get('method')!r}")
    endpoint = _endpoint_of(line)
    if line.get("url") != endpoint.value:
        urls = f"{Endpoint.CHAT.value} or {Endpoint.COMPLETION.value}"
        raise ApiError("invalid_url", f"url must be {urls}, got {line.get('url')!r}")
    return read_body(endpoint, line.get("body"), defaults)


def _endpoint_of(line: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that a line names, or seems to mean: its error must have a form too."""
    return Endpoint.CHAT if line.get("url") == Endpoint.CHAT.value else Endpoint.COMPLETION


def _take_tenant(line: dict[str, Any]) -> str | None:
    tenant = line.pop("tenant", None)
    if tenant is not None and not (isinstance(tenant, str) and tenant):
        shown = json_kind(tenant) if tenant != "" else "an empty one"
        raise invalid("tenant", f"must be a name, got {shown}")
    return tenant


def _load(data: bytes | None) -> dict[str, Any]:
    """Return the JSON object of a line, strictly: UTF-8, finite numbers, whole characters."""
    if data is None:
        raise ApiError("line_too_long", f"a line must not exceed {format_bytes(MAX_LINE_BYTES)}")
    try:
        line = parse_strict(data)
    except ValueError as error:
        raise ApiError("invalid_json", f"the line: {error}") from None
    if not isinstance(line, dict):
        raise ApiError("invalid_json", f"a line must be a JSON object, got {json_kind(line)}")
    return line


def _check_carried(carried: Mapping[str, Any], endpoint: Endpoint | None) -> None:
    if not isinstance(carried.get("return_kept", False), bool):
        raise ApiError("invalid_request", "return_kept must be true or false")
    for key in ("custom_id", "id", "reference", "category"):
        may_be_number = endpoint is None and key in ("custom_id", "id")
        if not isinstance(carried.get(key, ""), (str, int) if may_be_number else str):
            raise ApiError("invalid_request", f"{key} must be a text, got {json_kind(carried[key])}")
    metric = carried.get("metric", DEFAULT_METRIC)
    if not isinstance(metric, str) or metric not in METRICS:
        raise ApiError("invalid_request", f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
