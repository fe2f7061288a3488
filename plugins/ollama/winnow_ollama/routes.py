"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show and /api/version."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.openai.errors import ApiError
from winnow.openai.request import Endpoint, read_body
from winnow.openai.response import ChunkStream, compact_json
from winnow.server.endpoints.completions import StrictResponse, write
from winnow.server.forms import add_route
from winnow.server.http import read_json
from winnow.server.request_stream import RequestStream
from winnow.server.service import Service
from winnow_ollama.request import CHAT, GENERATE, is_empty, openai_body
from winnow_ollama.response import LineWriter

Record = dict[str, Any]

VERSION = "0.12.0"
"""Ollama's version whose API is spoken: clients ask for it, and leave those that are too old."""


def add_ollama_routes(app: FastAPI, service: Service) -> None:
    @add_route(app, "POST", CHAT)
    async def chat(request: Request) -> Response:
        """Answer a conversation, in the form of Ollama's API."""
        return await _answer(service, request, CHAT)

    @add_route(app, "POST", GENERATE)
    async def generate(request: Request) -> Response:
        """Answer a prompt, in the form of Ollama's API."""
        return await _answer(service, request, GENERATE)

    @add_route(app, "GET", "/api/tags")
    async def tags() -> Response:
        """List the model under each of its names, in the form of Ollama's API."""
        return JSONResponse({"models": [_tag(service, name) for name in service.names]})

    @add_route(app, "POST", "/api/show")
    async def show(request: Request) -> Response:
        """Describe the model, in the form of Ollama's API."""
        body = await read_json(request)
        name = body.get("model") or body.get("name")
        service.check_model(None if name is None else str(name), strict=True)
        template = str(getattr(service.llm.tokenizer, "chat_template", None) or "")
        marks = {"tools": "tools", "thinking": "thinking"}
        return StrictResponse(
            {
                "template": template,
                "details": _details(service),
                "model_info": {
                    "general.architecture": "winnow",
                    "winnow.context_length": service.llm.max_model_len,
                },
                "capabilities": ["completion", *(name for name, mark in marks.items() if mark in template)],
                "modified_at": _time(service),
            }
        )

    @add_route(app, "GET", "/api/version")
    async def version() -> Response:
        """Return the version of Ollama whose API this is."""
        return JSONResponse({"version": VERSION})


async def _answer(service: Service, request: Request, path: str) -> Response:
    body = await read_json(request)
    model = service.check_model(body.get("model"))
    if is_empty(body, path):
        return StrictResponse(LineWriter(model, path == CHAT).loaded())
    found, chat = openai_body(body, path, service.llm.max_model_len)
    endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETION
    # As Ollama, an answer is as long as it likes.
    asked = read_body(endpoint, found, {"max_tokens": None, **service.llm.conversation_defaults}, served=True)
    writer = LineWriter(model, path == CHAT)

    async def lines(stream: RequestStream, chunks: ChunkStream) -> AsyncIterator[list[Record]]:
        async for place, output in stream.answers():
            yield [line for chunk in chunks.push(place, output) for line in writer.push(chunk)]
        yield [writer.end(chunks.usage(), whole=not asked.stream)]

    return await write(
        service, request, asked, lines, lambda last, _: last, _error_body, _line(writer.line()), as_text=_line
    )


def _error_body(error: ApiError) -> Record:
    return {"error": str(error)}


def _line(record: Record) -> str:
    return compact_json(record) + "\n"


def _tag(service: Service, name: str) -> Record:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service),
        "size": service.llm.weight_bytes,
        "digest": sha256(name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> Record:
    llm = service.llm
    form = str(llm.dtype).removeprefix("torch.") if llm.weight_dtype == "auto" else llm.weight_dtype
    return {"format": "winnow", "family": llm.decoder, "families": [llm.decoder], "quantization_level": form}


def _time(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat()
