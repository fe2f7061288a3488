"""One line of the input, understood: a request, or what is wrong with it.

Three forms are read:

- flat: `{"prompt": "text" or [token ids]}` or `{"messages": [...]}`, sampling parameters beside it;
- OpenAI Batch: `{"custom_id", "method": "POST", "url", "body"}`, where `url` is /v1/chat/completions or /v1/completions
  and `body` holds the prompt and the sampling parameters under OpenAI's names.

Both may carry `reference`, `category` and `metric`, by which answers are scored, and `metadata`; they come back in the
record. Any other key that is not a sampling parameter is refused, since an ignored typo would change answers unseen.
"""

import enum
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.chat import normalise_messages
from winnow.cli.batch.errors import LineError
from winnow.cli.batch.parameters import sampling_from_batch, sampling_from_flat
from winnow.cli.batch.reader import MAX_LINE_BYTES, RawLine
from winnow.errors import InvalidRequestError
from winnow.sampling import SamplingParams
from winnow.units import format_bytes


class Form(enum.Enum):
    """How a line asks, and so how its record answers. Batch forms are named by their `url`."""

    FLAT = "flat"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


Message = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A line that can be handed to the engine: either `prompt` or `messages` is set.

    `model` is what a Batch body calls the model; `carried` holds the keys that come back in the record.
    """

    index: int
    number: int
    form: Form
    prompt: str | Sequence[int] | None
    messages: list[Message] | None
    params: SamplingParams
    model: str | None
    carried: Mapping[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be run."""

    index: int
    number: int
    form: Form
    error: LineError
    carried: Mapping[str, Any]


DEFAULT_METRIC = "exact"
# Those that compare with one reference, and need neither class names nor a package of their own.
METRICS = (DEFAULT_METRIC, "rouge-l", "qa-f1", "match-all")

_FLAT_CARRIED = ("custom_id", "id", "reference", "category", "metric", "metadata")
_BATCH_CARRIED = ("custom_id", "reference", "category", "metric", "metadata")
_BATCH_KEYS = ("method", "url", "body")


def parse_line(raw: RawLine, defaults: Mapping[str, Any]) -> Job | BadLine:
    """Read a line; `defaults` are the sampling parameters of lines that do not say."""
    form, carried = _guess_form(raw.data or b""), dict[str, Any]()
    try:
        line = _load(raw.data)
        form = _form(line)
        # Taken before anything is checked, so that an error record can name its request.
        carried = {key: line[key] for key in _carried_keys(form) if key in line}
        _check_carried(carried, form)
        if form is Form.FLAT:
            return _flat_job(raw, line, carried, defaults)
        return _batch_job(raw, line, form, carried, defaults)
    except LineError as error:
        return BadLine(raw.index, raw.number, form, error, carried)
    except Exception as error:
        return BadLine(raw.index, raw.number, form, LineError.wrap(error), carried)


def _flat_job(
    raw: RawLine, line: dict[str, Any], carried: dict[str, Any], defaults: Mapping[str, Any]
) -> Job:
    if ("prompt" in line) == ("messages" in line):
        raise LineError("invalid_request", "a line needs either prompt or messages")
    asked = {"prompt", "messages", *_FLAT_CARRIED}
    params = sampling_from_flat({key: value for key, value in line.items() if key not in asked}, defaults)
    prompt = _prompt(line["prompt"]) if "prompt" in line else None
    messages = _messages(line["messages"]) if "messages" in line else None
    return Job(raw.index, raw.number, Form.FLAT, prompt, messages, params, None, carried)


def _batch_job(
    raw: RawLine, line: dict[str, Any], form: Form, carried: dict[str, Any], defaults: Mapping[str, Any]
) -> Job:
    _refuse_unknown(line, {*_BATCH_KEYS, *_BATCH_CARRIED})
    if not carried.get("custom_id"):
        raise LineError("invalid_request", "custom_id must be a text that is not empty")
    if line.get("method") != "POST":
        raise LineError("invalid_request", f"method must be POST, got {line.get('method')!r}")
    if line.get("url") != form.value:
        urls = f"{Form.CHAT.value} or {Form.COMPLETION.value}"
        raise LineError("invalid_url", f"url must be {urls}, got {line.get('url')!r}")
    body = line.get("body")
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body must be an object, got {_kind(body)}")
    question = "messages" if form is Form.CHAT else "prompt"
    if question not in body:
        raise LineError("invalid_request", f"body needs {question} for {form.value}")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise LineError("invalid_request", f"model must be a text, got {_kind(model)}")
    others = {key: value for key, value in body.items() if key not in (question, "model")}
    params = sampling_from_batch(others, defaults, chat=form is Form.CHAT)
    prompt = _prompt(_single(body["prompt"])) if form is Form.COMPLETION else None
    messages = _messages(body["messages"]) if form is Form.CHAT else None
    return Job(raw.index, raw.number, form, prompt, messages, params, model, carried)


def _load(data: bytes | None) -> dict[str, Any]:
    """The JSON object of a line, strictly: UTF-8, finite numbers, whole characters."""
    if data is None:
        raise LineError("line_too_long", f"a line must not exceed {format_bytes(MAX_LINE_BYTES)}")
    try:
        text = data.decode("utf-8-sig")
        line = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if "\\ud" in text.lower():
            # JSON can spell half of a surrogate pair, which no UTF-8 file can hold and no tokenizer read.
            json.dumps(line, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise LineError("invalid_json", "the line is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"unreadable JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", f"unreadable JSON: {error}") from error
    if not isinstance(line, dict):
        raise LineError("invalid_json", f"a line must be a JSON object, got {_kind(line)}")
    return line


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _guess_form(data: bytes) -> Form:
    """The form of a line that may be unreadable, so that its error record fits its neighbours."""
    return Form.COMPLETION if b'"url"' in data and b'"body"' in data else Form.FLAT


def _form(line: Mapping[str, Any]) -> Form:
    if not any(key in line for key in _BATCH_KEYS):
        return Form.FLAT
    return Form.CHAT if line.get("url") == Form.CHAT.value else Form.COMPLETION


def _carried_keys(form: Form) -> tuple[str, ...]:
    return _FLAT_CARRIED if form is Form.FLAT else _BATCH_CARRIED


def _check_carried(carried: Mapping[str, Any], form: Form) -> None:
    kinds = (str, int) if form is Form.FLAT else (str,)
    for key in ("custom_id", "id"):
        if not isinstance(carried.get(key, ""), kinds):
            raise LineError("invalid_request", f"{key} must be a text, got {_kind(carried[key])}")
    for key in ("reference", "category"):
        if not isinstance(carried.get(key, ""), str):
            raise LineError("invalid_request", f"{key} must be a text, got {_kind(carried[key])}")
    metric = carried.get("metric", DEFAULT_METRIC)
    if not isinstance(metric, str) or metric not in METRICS:
        raise LineError("invalid_request", f"metric must be one of {', '.join(METRICS)}, got {metric!r}")


def _refuse_unknown(line: Mapping[str, Any], known: set[str]) -> None:
    for key in line:
        if key not in known:
            raise LineError("unknown_parameter", f"unknown key {key!r}")


def _single(prompt: Any) -> Any:
    """The prompt of a body, which OpenAI's form may wrap in a list of prompts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise LineError("invalid_request", f"a line must hold one prompt, got {len(prompt)}")
        return prompt[0]
    return prompt


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list):
        if not all(type(token) is int and token >= 0 for token in prompt):
            raise LineError("invalid_request", "prompt must be text or a list of token ids from 0 on")
    elif not isinstance(prompt, str):
        raise LineError("invalid_request", f"prompt must be text or a list of token ids, got {_kind(prompt)}")
    if not prompt:
        raise LineError("invalid_request", "prompt must not be empty")
    return prompt


def _messages(messages: Any) -> list[Message]:
    try:
        return normalise_messages(messages)
    except InvalidRequestError as error:
        raise LineError("invalid_request", str(error)) from error


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
