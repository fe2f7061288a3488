"""/v1/messages: a chat under Anthropic's face."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from winnow.anthropic.errors import error_body
from winnow.anthropic.messages import MessageWriter
from winnow.anthropic.request import cache_session, chat_body
from winnow.openai.errors import FAILED, ApiError
from winnow.openai.events import event
from winnow.openai.request import Endpoint, read_body
from winnow.openai.stream import ChunkStream
from winnow.server.endpoints.completions import (
    StrictResponse,
    new_chunks,
    response_form,
    stream_error,
)
from winnow.server.http import EventStream, unless_disconnected
from winnow.server.service import Service, Submitted


async def create_message(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    """Answer a body.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; before anything has been sent.
    """
    asked = read_body(
        Endpoint.CHAT, cache_session(body) | chat_body(body), service.llm.sampling_defaults, served=True
    )
    model = service.check_model(asked.model)
    tenant, request_id = request.state.tenant, request.state.request_id
    chunks = new_chunks(service, asked, response_form(service, asked, model))
    writer = MessageWriter(model)
    submitted = await unless_disconnected(request, service.submit(asked, tenant, request_id, deltas=True))
    if asked.stream:
        return EventStream(
            _written(submitted, chunks, writer, request_id),
            lambda: service.engine.abandon(submitted.stream),
        )

    async def whole() -> dict[str, Any]:
        try:
            async for _ in _events(submitted, chunks, writer):
                pass
        finally:
            service.engine.abandon(submitted.stream)
        return writer.object(chunks.usage())

    return StrictResponse(await unless_disconnected(request, whole()))


async def count_tokens(service: Service, body: Mapping[str, Any], tenant: str | None) -> dict[str, int]:
    """Return the tokens of a prompt.

    Raises:
        ApiError, InvalidRequestError: it cannot be used.
    """
    asked = read_body(
        Endpoint.CHAT, chat_body(body, counted=True), service.llm.sampling_defaults, served=True
    )
    service.check_model(asked.model)
    assert asked.messages is not None
    prompt = await service.tokenize_chat(asked.messages, asked.template, tenant)
    return {"input_tokens": len(prompt.token_ids)}


async def _events(
    submitted: Submitted, chunks: ChunkStream, writer: MessageWriter
) -> AsyncIterator[list[dict[str, Any]]]:
    async for output in submitted.stream:
        if output.error is not None:
            raise ApiError(FAILED, output.error)
        yield [each for chunk in chunks.push(0, output) for each in writer.push(chunk, chunks.usage())]
    yield list(writer.end(chunks.usage()))


async def _written(
    submitted: Submitted, chunks: ChunkStream, writer: MessageWriter, request_id: str
) -> AsyncIterator[str]:
    try:
        async for found in _events(submitted, chunks, writer):
            if found:
                yield "".join(event(each, each["type"]) for each in found)
    except Exception as error:
        yield event(error_body(stream_error(error), request_id), "error")
