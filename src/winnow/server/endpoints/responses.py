"""/v1/responses: a chat under another face, and responses that were kept."""

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.openai.errors import invalid
from winnow.openai.request import Endpoint, read_body
from winnow.openai.response import ChunkStream
from winnow.openai.response_writer import ResponseWriter
from winnow.openai.responses import PATH, chat_body, conversation_id, input_items, new_id
from winnow.server.endpoints.completions import write
from winnow.server.endpoints.file_routes import page
from winnow.server.forms import add_route
from winnow.server.request_stream import RequestStream
from winnow.server.service import Service


async def respond(service: Service, request: Request, body: Mapping[str, Any]) -> Response:
    tenant = request.state.tenant
    kept = service.responses[tenant]
    items = input_items(body, kept.item)
    named = conversation_id(body)
    before = kept.before(body.get("previous_response_id"), named)
    conversation = items if before is None else [*before.conversation(), *items]
    chat, name, store = chat_body(body, conversation), new_id("resp"), body.get("store")
    if not isinstance(store, bool | None):
        raise invalid("store", f"must be true or false, got {store!r:.80}")
    stored = store is not False and kept.max_bytes > 0
    if stored and not chat.get("prompt_cache_key"):
        chat.setdefault("session_id", named or (name if before is None else before.first_id))
    asked = read_body(Endpoint.CHAT, chat, service.llm.conversation_defaults, served=True)
    model = service.check_model(asked.model)
    writer = ResponseWriter(body, model, int(time.time()), stored, name)

    async def events(stream: RequestStream, chunks: ChunkStream) -> AsyncIterator[list[dict[str, Any]]]:
        yield list(writer.begin())
        async for place, output in stream.answers():
            yield [each for chunk in chunks.push(place, output) for each in writer.push(chunk)]
        last = list(writer.end(chunks.usage()))
        if writer.stored:  # first: the client may continue at once
            kept.add(last[-1]["response"], items, before, named)
        yield last

    return await write(service, request, asked, events, lambda last, _: last["response"], writer.fail)


def add_response_routes(app: FastAPI, service: Service) -> None:
    @add_route(app, "GET", f"{PATH}/{{name}}")
    async def get_response(request: Request, name: str) -> Response:
        """Return a response that was kept."""
        turn = service.responses[request.state.tenant].get(name)
        return Response(turn.response, media_type="application/json")

    @add_route(app, "DELETE", f"{PATH}/{{name}}")
    async def delete_response(request: Request, name: str) -> Response:
        """Forget a response; those that continue it can still be continued."""
        service.responses[request.state.tenant].delete(name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @add_route(app, "GET", f"{PATH}/{{name}}/input_items")
    async def list_input_items(
        request: Request, name: str, limit: str = "100", after: str | None = None, order: str = "desc"
    ) -> Response:
        """List what a response answers, newest first: the conversation before it, and its own input."""
        items = service.responses[request.state.tenant].get(name).input_items()
        return page(items[::-1], limit, after, order)
