"""/v1/responses: a chat under another face."""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from winnow.openai.errors import FAILED, ApiError
from winnow.openai.events import event
from winnow.openai.request import Endpoint, read_body
from winnow.openai.responses import ResponseWriter, chat_body
from winnow.openai.stream import ChunkStream
from winnow.server.endpoints.completions import (
    StrictResponse,
    new_chunks,
    response_form,
    stream_error,
)
from winnow.server.http import EventStream, unless_disconnected
from winnow.server.service import Service, Submitted


async def respond(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    """Answer a body.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; before anything has been sent.
    """
    asked = read_body(Endpoint.CHAT, chat_body(body), service.llm.sampling_defaults, served=True)
    model = service.check_model(asked.model)
    tenant, request_id = request.state.tenant, request.state.request_id
    chunks = new_chunks(service, asked, response_form(service, asked, model))
    writer = ResponseWriter(body, model, int(time.time()))
    submitted = await unless_disconnected(request, service.submit(asked, tenant, request_id, deltas=True))
    if asked.stream:
        return EventStream(
            _events(submitted, chunks, writer),
            lambda: service.engine.abandon(submitted.stream),
        )
    return StrictResponse(await unless_disconnected(request, _whole(service, submitted, chunks, writer)))


async def _whole(
    service: Service, submitted: Submitted, chunks: ChunkStream, writer: ResponseWriter
) -> dict[str, Any]:
    try:
        async for output in submitted.stream:
            if output.error is not None:
                raise ApiError(FAILED, output.error)
            for chunk in chunks.push(0, output):
                for _ in writer.push(chunk):
                    pass
    finally:
        service.engine.abandon(submitted.stream)
    response: dict[str, Any] = list(writer.end(chunks.usage()))[-1]["response"]
    return response


async def _events(submitted: Submitted, chunks: ChunkStream, writer: ResponseWriter) -> AsyncIterator[str]:
    def text(found: dict[str, Any]) -> str:
        return event(found, found["type"])

    try:
        for found in writer.begin():
            yield text(found)
        async for output in submitted.stream:
            if output.error is not None:
                raise ApiError(FAILED, output.error)
            found_now = [each for chunk in chunks.push(0, output) for each in writer.push(chunk)]
            if found_now:
                yield "".join(map(text, found_now))
        for found in writer.end(chunks.usage()):
            yield text(found)
    except Exception as error:
        yield text(writer.fail(stream_error(error)))
