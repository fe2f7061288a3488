"""/v1/messages: a chat under Anthropic's face."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from winnow.anthropic.context import edited, is_due, read_edits
from winnow.anthropic.messages import MessageWriter, error_body
from winnow.anthropic.request import cache_session, chat_body
from winnow.openai.errors import ApiError
from winnow.openai.request import CompletionRequest, Endpoint, read_body
from winnow.openai.response import ChunkStream, event
from winnow.server.endpoints.completions import write
from winnow.server.request_stream import RequestStream
from winnow.server.service import Service


async def create_message(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    asked, edits, _ = await _asked(service, body, request.state.tenant)
    writer = MessageWriter(service.check_model(asked.model), edits)

    async def events(stream: RequestStream, chunks: ChunkStream) -> AsyncIterator[list[dict[str, Any]]]:
        async for place, output in stream.answers():
            yield [
                each for chunk in chunks.push(place, output) for each in writer.push(chunk, chunks.usage())
            ]
        yield list(writer.end(chunks.usage()))

    def whole(_: dict[str, Any], chunks: ChunkStream) -> dict[str, Any]:
        return writer.object(chunks.usage())

    def failed(error: ApiError) -> dict[str, Any]:
        return error_body(error, request.state.request_id)

    return await write(service, request, asked, events, whole, failed, event({"type": "ping"}, "ping"))


async def count_tokens(service: Service, body: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    asked, edits, before = await _asked(service, body, tenant, counted=True)
    service.check_model(asked.model)
    assert asked.messages is not None
    prompt = await service.tokenize_chat(asked.messages, asked.template, tenant)
    found: dict[str, Any] = {"input_tokens": len(prompt.token_ids)}
    return found if edits is None else found | {"context_management": {"original_input_tokens": before}}


async def _asked(
    service: Service, body: Mapping[str, Any], tenant: str | None, *, counted: bool = False
) -> tuple[CompletionRequest, list[dict[str, Any]] | None, int]:
    """Return what a body asks, the edits that its conversation has undergone, and its tokens before them.

    The edits are None, and the tokens 0, where it asks for none.
    """
    session = {} if counted else cache_session(body)
    asked = read_body(
        Endpoint.CHAT,
        session | chat_body(body, counted=counted),
        service.llm.conversation_defaults,
        served=True,
    )
    if body.get("context_management") is None:
        return asked, None, 0
    edits, applied = read_edits(body["context_management"]), []
    messages = await service.llm.fetch_images(asked.messages or ())

    async def count() -> int:
        return len((await service.tokenize_chat(messages, asked.template, tenant)).token_ids)

    before = tokens = await count()
    for edit in edits:
        if not is_due(edit, messages, tokens):
            continue
        kept, (messages, report) = messages, edited(edit, messages)
        left = await count()
        if tokens - left < (edit.get("clear_at_least") or {"value": 0})["value"]:
            messages = kept
        elif any(report.values()):
            applied.append({"type": edit["type"], **report, "cleared_input_tokens": tokens - left})
            tokens = left
    return replace(asked, messages=messages), applied, before
