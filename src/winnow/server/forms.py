"""Forms of requests, for /openapi.json: sampling parameters as `SamplingParams` declares them, and the fields beside
them. What these may hold is checked in `winnow.openai`; the limits are its own.

tests/server/test_openapi.py holds the fields against what is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.responses import Response

from winnow.anthropic.messages import speaks_anthropic
from winnow.config.option import documented
from winnow.openai.errors import invalid
from winnow.openai.request import MAX_MESSAGES, MAX_PRIORITY, MAX_SEQUENCES
from winnow.openai.tools import MAX_TOOLS
from winnow.sampling.list_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from winnow.sampling.params import MAX_LOGPROBS, READERS, SamplingParams
from winnow.values.checks import MAX_COUNT, Limits
from winnow.values.session_request import MAX_SESSION_NAME, MAX_TTL


class Form(BaseModel):
    """An object without other fields than those named."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def said(description: str, **limits: Any) -> Any:
    """Return an optional field with a description."""
    return Field(None, description=description, **limits)


class StreamOptions(Form):
    include_usage: bool | None = said("end with a chunk that counts tokens")
    continuous_usage_stats: bool | None = said("count tokens in every chunk")
    include_obfuscation: bool | None = None


class StructuredForm(Form):
    """Exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = said("in Lark's syntax, as llguidance reads it")
    json_object: bool | None = None


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]
"""An object: a function, or allowed_tools."""
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class BodyForm(Form):
    """Common part of chats and completions beside the sampling parameters."""

    model: str | None = None
    stop: str | list[str] | None = said(f"at most {MAX_STOP_STRINGS} of at most {MAX_STOP_LENGTH} characters")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredForm | None = None
    priority: int | None = said("lower is served first, as in vLLM", ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    return_token_ids: bool | None = None
    return_kept: bool | None = said("report KVs kept by layer and head in eviction")
    eviction: str | None = said("what decides which KVs stay: a preset of `winnow policies`")
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = said("a session_id, where there is none")
    prompt_cache_retention: str | None = said("in_memory, 5m, 1h or 24h")
    session_id: str | None = said(
        "the conversation that the one prompt continues; also from the header X-Session-ID",
        min_length=1,
        max_length=MAX_SESSION_NAME,
    )
    session_memory: int | str | None = said(
        "bytes, such as 64MiB, beyond which its oldest turns are compressed"
    )
    ttl: float | None = said("seconds for which it is kept once idle, or refused", ge=0, le=MAX_TTL)
    prefetch: bool | None = said("generate nothing: bring back what files hold of the prompt")
    release: bool | None = said("forget it when this answer has ended")


class CompletionForm(BodyForm):
    """Body with one prompt or several to continue."""

    prompt: Text | TokenIds | list[Text] | list[TokenIds] = Field(
        min_length=1, description=f"at most {MAX_SEQUENCES} prompts, and prompts times n"
    )
    max_tokens: int | None = said("default 16; 0 with echo alone", ge=0, le=MAX_COUNT)
    echo: bool | None = None


class MessageForm(BaseModel):
    """A message; fields beside these reach the model's template."""

    role: str
    content: str | list[dict[str, Any]] | None = said("parts text or image_url; null beside tool_calls alone")


class ToolForm(Form):
    type: Literal["function"]
    function: dict[str, Any]


class ChatForm(BodyForm):
    """Answer a conversation."""

    messages: list[MessageForm] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = said("needs logprobs", ge=0, le=MAX_LOGPROBS)
    tools: list[ToolForm] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ResponsesForm(BaseModel):
    """Answer a conversation, as the Responses API asks. Sampling parameters of chats may stand beside these."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = said("a response that was kept")
    conversation: str | dict[str, Any] | None = said("the id of a conversation, which comes first")
    store: bool | None = said("whether it is kept; default true")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    stream: bool | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None


class AnthropicMessage(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]] = Field(
        description="blocks text, image, tool_use, tool_result, thinking"
    )


class AnthropicPromptForm(BaseModel):
    """Count the tokens of a conversation."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = said("of type auto, any, tool or none")
    thinking: dict[str, Any] | None = said("of type enabled, adaptive or disabled")
    output_config: dict[str, Any] | None = said("effort, and the format of the answer")
    context_management: dict[str, Any] | None = said("edits of the conversation")
    cache_control: dict[str, Any] | None = said("no mark is needed: prompts are cached")


class AnthropicForm(AnthropicPromptForm):
    """Answer a conversation, as Anthropic's API asks. Sampling parameters of chats may stand beside these."""

    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    metadata: dict[str, Any] | None = said("user_id")


class TokenizeForm(Form):
    """Text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageForm] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeForm(Form):
    model: str | None = None
    tokens: list[TokenId]


ShortText = Annotated[str, Field(max_length=512)]


class BatchForm(Form):
    """Answer every line of a file."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[ShortText, ShortText] | None = Field(None, max_length=16)
    output_expires_after: dict[str, Any] | None = None


def _bounded(kind: Any, limits: Limits | None) -> Any:
    """Return a type annotation whose numbers are within `limits`, also those of lists."""
    if limits is not None and kind in (int, float):
        return Annotated[kind, (Gt if limits.open else Ge)(limits.low), Le(limits.high)]
    if isinstance(kind, UnionType):
        return reduce(or_, (_bounded(each, limits) for each in get_args(kind)))
    if get_origin(kind) is Sequence:
        return list[_bounded(get_args(kind)[0], limits)]  # type: ignore[misc]
    return kind


def _with_parameters(form: type[BaseModel], *names: str) -> type[BaseModel]:
    """Return a form that has the fields of `SamplingParams` too, or those named; what it says itself counts."""
    texts, found = documented(SamplingParams), {}
    for each in fields(SamplingParams):
        if each.name not in (*form.model_fields, *READERS, "output_kind") and each.name in (names or texts):
            kind = _bounded(each.type, each.metadata.get("limits"))
            most = each.metadata.get("most")
            found[each.name] = kind | None, Field(None, max_length=most, description=texts[each.name])
    return create_model(form.__name__, __base__=form, __doc__=form.__doc__, **found)  # type: ignore[call-overload]


FORMS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": _with_parameters(ChatForm),
    "/v1/completions": _with_parameters(CompletionForm),
    "/v1/responses": _with_parameters(ResponsesForm, "temperature", "top_p"),
    "/v1/messages": _with_parameters(AnthropicForm, "temperature", "top_p", "top_k"),
    "/v1/messages/count_tokens": AnthropicPromptForm,
    "/tokenize": TokenizeForm,
    "/detokenize": DetokenizeForm,
    "/v1/batches": BatchForm,
}
"""The form of what is posted, by path."""


def check_body(path: str, body: Mapping[str, Any]) -> None:
    """Check what is posted to a path by its form. Raises ApiError: names the field, the value and what is allowed."""
    try:
        FORMS[path].model_validate(body, strict=True)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        where, fault = (
            [str(each)[:80] for each in first["loc"]],
            f"{first['msg'][0].lower()}{first['msg'][1:]}",
        )
        raise invalid(".".join(where), f"is wrong: {fault}, got {first['input']!r:.80}", where[0]) from None


def add_route(app: FastAPI, method: str, path: str) -> Callable[[Any], Any]:
    """Return a decorator that adds a route to an app, with what /openapi.json says of it."""
    described = _body(path) if method == "POST" else _parameters(path)
    return app.api_route(
        path, methods=[method], response_class=Response, responses=_errors(path), openapi_extra=described
    )


def _errors(path: str) -> dict[int | str, dict[str, Any]]:
    text = {"type": "string"}
    error: dict[str, Any] = {"type": text, "message": text}
    found: dict[str, Any] = {"error": {"type": "object", "properties": error}}
    if speaks_anthropic(path):
        found |= {"type": text, "request_id": text}
    else:
        error["param"] = error["code"] = {"type": ["string", "null"]}
    content = {"application/json": {"schema": {"type": "object", "properties": found}}}
    described = {"description": "an error", "content": content}
    return {"4XX": described, "5XX": described}


def _body(path: str) -> dict[str, Any] | None:
    schema: dict[str, Any]
    if path == "/v1/files":
        schema = {
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"type": "string", "enum": ["batch"]},
            },
            "required": ["file", "purpose"],
        }
        return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
    if path not in FORMS:
        return _parameters(path)
    schema = _inlined(FORMS[path].model_json_schema())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _parameters(path: str) -> dict[str, Any] | None:
    """Describe what stands in a path and behind it."""
    names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if path in ("/v1/files", "/v1/batches", "/v1/responses/{name}/input_items"):
        found += [
            {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10000}},
            {"name": "after", "in": "query", "schema": {"type": "string"}},
        ]
    if path.endswith("/input_items"):
        found.append({"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}})
    return {"parameters": found} if found else None


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its definitions in place of references to them: these forms nest, and do not recur."""
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {name: resolve(each) for name, each in value.items()}
        return [resolve(each) for each in value] if isinstance(value, list) else value

    found: dict[str, Any] = resolve(schema)
    return found
