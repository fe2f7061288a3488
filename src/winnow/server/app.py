"""The ASGI app: routes, and what becomes of errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from winnow.errors import WinnowError
from winnow.openai.errors import INTERNAL, ApiError
from winnow.server.access import Sites
from winnow.server.batches import Batches
from winnow.server.endpoints.file_routes import add_file_routes
from winnow.server.endpoints.responses import add_response_routes
from winnow.server.forms import FILES
from winnow.server.http import ClientLeft, Gate, error_response
from winnow.server.pages import PAGES, History, add_pages
from winnow.server.routes import add_routes
from winnow.server.service import Service
from winnow.server.store import Store

_OPEN = ("/health", "/ping", "/ready", *PAGES)
"""Paths that are served without a key: they hold no data."""


def create_app(service: Service) -> FastAPI:
    """Return the app that serves `service`; its engine starts and ends with the app."""
    config = service.config
    batches = None if config.files_dir is None else Batches(service, Store(Path(config.files_dir)))
    history = History(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        if batches is not None:
            batches.resume()
        recording = asyncio.create_task(history.record()) if config.dashboard else None
        try:
            yield
        finally:
            if recording is not None:
                recording.cancel()
            if batches is not None:
                await batches.stop()
            await service.close()

    app = FastAPI(
        title="Winnow",
        description="The OpenAI API over an engine that runs large language models on little memory.",
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json" if config.docs else None,
    )
    app.state.service = service
    add_routes(app, service)
    add_response_routes(app, service)
    for point in entry_points(group="winnow.routes"):
        point.load()(app, service)
    add_pages(app, service, history)
    if batches is not None:
        add_file_routes(app, batches)
    add_error_handlers(app)
    app.add_middleware(
        Gate,
        keys=service.keys,
        sites=Sites(config, service.keys),
        open_paths=(*_OPEN, "/metrics") if config.open_metrics else _OPEN,
        require_usable=service.engine.require_usable,
        max_body=lambda path: config.max_file if path == FILES else config.max_body,
        logs=config.log_requests,
    )
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Say every error in OpenAI's envelope; what is no user's fault, without what is inside the server."""

    def handle(kind: type[Exception], convert: Callable[[Any], ApiError]) -> None:
        async def respond(request: Request, error: Exception) -> Response:
            return _response(convert(error), request)

        app.add_exception_handler(kind, respond)

    handle(WinnowError, ApiError.wrap)
    fault = ApiError(INTERNAL, "the server failed while it served this request; its log says why")
    handle(Exception, lambda error: fault)

    async def no_client(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientLeft, no_client)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for these alone"
        codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
        code = codes.get(error.status_code, "invalid_request")
        response = _response(ApiError(code, str(error.detail)), request)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods(app, request))
        return response

    app.add_exception_handler(HTTPException, of_http)


def _response(error: ApiError, request: Request) -> Response:
    return error_response(error, request.url.path, getattr(request.state, "request_id", None))


def _methods(app: FastAPI, request: Request) -> list[str]:
    """Return what a path serves, of all its routes: Starlette names the methods of the first alone."""
    allowed = set[str]()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            allowed |= route.methods or set()
    return sorted(allowed | {"HEAD"} if "GET" in allowed else allowed)
