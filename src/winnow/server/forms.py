"""Forms of requests, for /openapi.json: sampling parameters as `SamplingParams` declares them, and the fields beside
them. What these may hold is checked in `winnow.openai`; the limits are its own.
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

from winnow.config.option import documented
from winnow.openai.errors import invalid
from winnow.openai.request import MAX_MESSAGES, MAX_PRIORITY, MAX_SEQUENCES
from winnow.openai.tools import MAX_TOOLS
from winnow.sampling.list_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from winnow.sampling.params import MAX_LOGPROBS, READERS, SamplingParams
from winnow.values.checks import MAX_COUNT, Limits
from winnow.values.session_request import MAX_SESSION_NAME

FILES = "/v1/files"

Object = dict[str, Any]


class Form(BaseModel):
    """An object without other fields than those named."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def said(description: str, **limits: Any) -> Any:
    """Return an optional field with a description."""
    return Field(None, description=description, **limits)


TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Messages = Annotated[list[Object], Field(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[Object], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | Object
"""An object: a function, or allowed_tools."""


class BodyForm(Form):
    """Common part of chats and completions beside the sampling parameters."""

    model: str | None = None
    stop: str | list[str] | None = said(f"at most {MAX_STOP_STRINGS} of at most {MAX_STOP_LENGTH} characters")
    stream: bool | None = None
    stream_options: Object | None = said("include_usage, continuous_usage_stats: count at the end, always")
    response_format: Object | None = None
    structured_outputs: Object | None = said("one of json, regex, choice, grammar, json_object")
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
    prompt_cache_retention: str | None = said("no effect: KVs are kept while memory lasts")
    session_id: str | None = said(
        "the conversation that the one prompt continues; also from the header X-Session-ID",
        min_length=1,
        max_length=MAX_SESSION_NAME,
    )
    session_memory: int | str | None = said("bytes (64MiB) beyond which its oldest turns are compressed")
    release: bool | None = said("forget it when this answer has ended")


class CompletionForm(BodyForm):
    prompt: Text | TokenIds | list[Text] | list[TokenIds] = Field(
        min_length=1, description=f"at most {MAX_SEQUENCES} prompts, and prompts times n"
    )
    max_tokens: int | None = said("default 16; 0 with echo alone", ge=0, le=MAX_COUNT)
    echo: bool | None = None


class ChatForm(BodyForm):
    messages: Messages = Field(
        description="of role and content: text, or parts text and image_url; other fields reach the template"
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = said("needs logprobs", ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None
    documents: list[Object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ResponsesForm(BaseModel):
    """Sampling parameters of chats may stand beside these."""

    input: str | list[Object]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = said("a response that was kept")
    conversation: str | Object | None = said("the id of a conversation, which comes first")
    store: bool | None = said("whether it is kept; default true")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    stream: bool | None = None
    text: Object | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None


class AnthropicPromptForm(BaseModel):
    model: str
    messages: Messages = Field(
        description="blocks text, image, document, search_result, tool_use, tool_result, thinking"
    )
    system: str | list[Object] | None = None
    tools: Tools | None = None
    tool_choice: Object | None = said("of type auto, any, tool or none")
    thinking: Object | None = said("of type enabled, adaptive or disabled")
    output_config: Object | None = said("effort, and the format of the answer")
    context_management: Object | None = said("edits of the conversation")
    cache_control: Object | None = said("no mark is needed: prompts are cached")


class AnthropicForm(AnthropicPromptForm):
    """Sampling parameters of chats may stand beside these."""

    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    metadata: Object | None = said("user_id")


class TokenizeForm(Form):
    model: str | None = None
    prompt: str | None = None
    messages: list[Object] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeForm(Form):
    model: str | None = None
    tokens: list[TokenId]


class FileForm(Form):
    file: bytes
    purpose: Literal["batch"]


ShortText = Annotated[str, Field(max_length=512)]


class BatchForm(Form):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[ShortText, ShortText] | None = Field(None, max_length=16)
    output_expires_after: Object | None = None


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
    FILES: FileForm,
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
    """Return a decorator that adds a route to an app, with what /openapi.json says of its body and its errors."""
    described: Object = {}
    if method == "POST" and path in FORMS:
        kind = "multipart/form-data" if path == FILES else "application/json"
        content = {kind: {"schema": FORMS[path].model_json_schema()}}
        described["requestBody"] = {"required": True, "content": content}
    error = {"description": "an error, as OpenAI's API says it, below /v1/messages Anthropic's"}
    return app.api_route(
        path,
        methods=[method],
        response_class=Response,
        responses={"4XX": error, "5XX": error},
        openapi_extra=described,
    )
