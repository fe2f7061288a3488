"""/v1/chat/completions and /v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.errors import WinnowError
from winnow.openai.errors import ApiError
from winnow.openai.request import CompletionRequest, Endpoint, read_body
from winnow.openai.response import ChunkStream, ResponseForm, completion_object, event
from winnow.outputs import RequestOutput
from winnow.server.http import EventStream, unless_disconnected
from winnow.server.request_stream import RequestStream
from winnow.server.service import Service
from winnow.values.json_values import dump_json

Record = dict[str, Any]


class StrictResponse(JSONResponse):
    """JSON without NaN and infinities."""

    def render(self, content: Any) -> bytes:
        return dump_json(content, ensure_ascii=False, separators=(",", ":")).encode()


async def complete(
    service: Service, request: Request, endpoint: Endpoint, body: Mapping[str, Any]
) -> Response:
    asked = read_body(endpoint, body, service.llm.conversation_defaults, served=True)
    stream, form = await _submit(service, request, asked, deltas=asked.stream)
    if asked.stream:
        texts = _events(stream, asked, ChunkStream(form))
        return EventStream(texts, lambda: service.engine.abandon(stream))

    async def collect() -> list[RequestOutput]:
        try:
            found = {place: output async for place, output in stream.answers()}
        finally:
            service.engine.abandon(stream)
        return [found[place] for place in range(len(found))]

    return StrictResponse(completion_object(form, await unless_disconnected(request.receive, collect())))


async def write(
    service: Service,
    request: Request,
    asked: CompletionRequest,
    events: Callable[[RequestStream, ChunkStream], AsyncIterator[list[Record]]],
    whole: Callable[[Record, ChunkStream], Record],
    failed: Callable[[ApiError], Record],
    ping: str = ": ping\n\n",
    as_text: Callable[[Record], str] | None = None,
) -> Response:
    """Answer a chat in another API's form: with events as they come, or with the object that they come to.

    Args:
        events: returns the events, those of a step in one list.
        whole: returns the object, by the last event.
        failed: returns the event of an error in the middle of a stream.
        as_text: writes a line of JSON; None: they are server-sent events.
    """
    stream, form = await _submit(service, request, asked, deltas=True)
    chunks = ChunkStream(form)
    found, text_of = events(stream, chunks), as_text or (lambda one: event(one, one["type"]))

    async def texts() -> AsyncIterator[str]:
        try:
            async for each in found:
                if each:
                    yield "".join(map(text_of, each))
        except Exception as error:
            yield text_of(failed(stream_error(error)))

    async def drain() -> Record:
        try:
            async for each in found:
                last = each
            return whole(last[-1], chunks)
        finally:
            service.engine.abandon(stream)

    if asked.stream:
        kind = EventStream.media_type if as_text is None else "application/x-ndjson"
        return EventStream(texts(), lambda: service.engine.abandon(stream), ping, kind)
    return StrictResponse(await unless_disconnected(request.receive, drain()))


async def _submit(
    service: Service, request: Request, asked: CompletionRequest, *, deltas: bool
) -> tuple[RequestStream, ResponseForm]:
    model, state = service.check_model(asked.model), request.state
    work = service.submit(asked, state.tenant, state.request_id, deltas=deltas)
    stream = state.stream = await unless_disconnected(request.receive, work)
    return stream, ResponseForm(asked, service.reader, uuid.uuid4().hex, model, int(time.time()))


async def _events(stream: RequestStream, asked: CompletionRequest, chunks: ChunkStream) -> AsyncIterator[str]:
    try:
        async for place, output in stream.answers():
            if text := chunks.events(place, output):
                yield text
        if asked.include_usage:
            yield event(chunks.usage_chunk())
    except Exception as error:
        # The status is out: the error goes where the next chunk would.
        yield event(stream_error(error).body())
    yield event("[DONE]")


def stream_error(error: Exception) -> ApiError:
    """Return the message of an error in the middle of a stream: it discloses nothing internal."""
    if isinstance(error, WinnowError):
        return ApiError.wrap(error)
    return ApiError("internal_error", "the server failed while it wrote the answer")
