"""/v1/responses: a chat under another face."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from winnow.openai.errors import FAILED, ApiError
from winnow.openai.events import event
from winnow.openai.request import Endpoint, read_body
from winnow.openai.response_writer import ResponseWriter
from winnow.openai.responses import chat_body, conversation_id, input_items, new_id
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
    tenant, request_id = request.state.tenant, request.state.request_id
    kept = service.responses[tenant]
    items = input_items(body, kept.item)
    named = conversation_id(body)
    before = kept.before(body.get("previous_response_id"), named)
    conversation = items if before is None else [*before.conversation(), *items]
    chat, name, stored = (
        chat_body(body, conversation),
        new_id("resp"),
        _is_stored(body) and kept.max_bytes > 0,
    )
    if stored and not chat.get("prompt_cache_key"):
        chat.setdefault("session_id", named or (name if before is None else before.first_id))
    asked = read_body(Endpoint.CHAT, chat, service.llm.sampling_defaults, served=True)
    model = service.check_model(asked.model)
    chunks = new_chunks(service, asked, response_form(service, asked, model))
    writer = ResponseWriter(body, model, int(time.time()), stored, name)

    def keep(response: Mapping[str, Any]) -> None:
        if writer.stored:
            kept.add(response, items, before, named)

    submitted = await unless_disconnected(request, service.submit(asked, tenant, request_id, deltas=True))
    if asked.stream:
        return EventStream(
            _events(submitted, chunks, writer, keep),
            lambda: service.engine.abandon(submitted.stream),
        )
    response = await unless_disconnected(request, _whole(service, submitted, chunks, writer))
    keep(response)
    return StrictResponse(response)


def _is_stored(body: Mapping[str, Any]) -> bool:
    store = body.get("store")
    if not isinstance(store, bool | None):
        raise ApiError("invalid_request", f"store must be true or false, got {store!r:.80}", "store")
    return store is not False


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


async def _events(
    submitted: Submitted,
    chunks: ChunkStream,
    writer: ResponseWriter,
    keep: Callable[[Mapping[str, Any]], None],
) -> AsyncIterator[str]:
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
        last = list(writer.end(chunks.usage()))
        keep(last[-1]["response"])  # first: the client may continue at once
        for found in last:
            yield text(found)
    except Exception as error:
        yield text(writer.fail(stream_error(error)))
