"""/v1/chat/completions and /v1/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.errors import WinnowError
from winnow.openai.errors import FAILED, ApiError
from winnow.openai.events import event
from winnow.openai.request import CompletionRequest, Endpoint, read_body
from winnow.openai.response import ResponseForm, completion_object
from winnow.openai.stream import ChunkStream
from winnow.outputs import RequestOutput
from winnow.server.http import EventStream, unless_disconnected
from winnow.server.service import Service, Submitted
from winnow.values.json_values import dump_json


class StrictResponse(JSONResponse):
    """JSON without NaN and infinities."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return dump_json(content, ensure_ascii=False, separators=(",", ":")).encode()


async def complete(
    service: Service, request: Request, endpoint: Endpoint, body: Mapping[str, Any]
) -> Response:
    """Answer a body.

    Raises:
        ApiError, InvalidRequestError: it cannot be served; before anything has been sent.
    """
    asked = read_body(endpoint, body, service.llm.sampling_defaults, served=True)
    model = service.check_model(asked.model)
    tenant, request_id = request.state.tenant, request.state.request_id
    form = response_form(service, asked, model)
    submitted = await unless_disconnected(
        request, service.submit(asked, tenant, request_id, deltas=asked.stream)
    )
    if asked.stream:
        chunks = new_chunks(service, asked, form)
        return EventStream(
            _events(submitted, chunks, include_usage=asked.include_usage),
            lambda: service.engine.abandon(submitted.stream),
        )
    outputs = await unless_disconnected(request, collect(service, submitted))
    return StrictResponse(completion_object(form, outputs))


def response_form(service: Service, asked: CompletionRequest, model: str) -> ResponseForm:
    """Return what the objects that answer a body have in common."""
    return ResponseForm.of(asked, service.reader, uuid.uuid4().hex, model, int(time.time()))


def new_chunks(service: Service, asked: CompletionRequest, form: ResponseForm) -> ChunkStream:
    """Return what turns the deltas of a body's requests into chunks."""
    tools, calls = asked.template.tools, asked.calls
    return ChunkStream(
        form,
        include_usage=asked.include_usage,
        continuous=asked.continuous_usage,
        new_parser=(
            None if form.parse is None else lambda output: service.reader.parser(output.prompt, tools, calls)
        ),
    )


async def collect(service: Service, submitted: Submitted) -> list[RequestOutput]:
    """Wait for the outputs of requests, in the order of their prompts.

    Raises:
        ApiError: one of them failed.
    """
    found: dict[str, RequestOutput] = {}
    try:
        async for output in submitted.stream:
            found[output.request_id] = output
            if output.error is not None:
                raise ApiError(FAILED, output.error)
    finally:
        service.engine.abandon(submitted.stream)
    return [found[name] for name in submitted.ids]


async def _events(submitted: Submitted, chunks: ChunkStream, *, include_usage: bool) -> AsyncIterator[str]:
    try:
        async for output in submitted.stream:
            if output.error is not None:
                raise ApiError(FAILED, output.error)
            text = chunks.events(submitted.place(output), output)
            if text:
                yield text
        if include_usage:
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
