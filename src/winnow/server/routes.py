"""The routes that every server has."""

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow import __version__
from winnow.openai.errors import SHUTTING_DOWN, UNHEALTHY, ApiError
from winnow.openai.request import Endpoint
from winnow.outputs import SessionStats
from winnow.server.async_engine import RETRY_SECONDS
from winnow.server.endpoints.completions import StrictResponse, complete
from winnow.server.endpoints.messages import count_tokens, create_message
from winnow.server.endpoints.responses import respond
from winnow.server.endpoints.tokens import detokenize, tokenize
from winnow.server.forms import add_route
from winnow.server.http import error_response, read_json, read_turn
from winnow.server.service import Service


def add_routes(app: FastAPI, service: Service) -> None:
    """Add them to the app."""

    @add_route(app, "POST", "/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await complete(service, request, Endpoint.CHAT, await read_turn(request))

    @add_route(app, "POST", "/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await complete(service, request, Endpoint.COMPLETION, await read_turn(request))

    @add_route(app, "POST", "/v1/responses")
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the form of the Responses API."""
        return await respond(service, request, await read_turn(request))

    @add_route(app, "POST", "/v1/messages")
    async def messages(request: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's Messages API."""
        return await create_message(service, request, await read_turn(request))

    @add_route(app, "POST", "/v1/messages/count_tokens")
    async def message_tokens(request: Request) -> Response:
        """Count the tokens of a conversation, in the form of Anthropic's Messages API."""
        return StrictResponse(await count_tokens(service, await read_json(request), request.state.tenant))

    @add_route(app, "GET", "/v1/models")
    async def models(request: Request) -> Response:
        """List the model under each of its names."""
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})

    @add_route(app, "GET", "/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        """Describe the model."""
        name = request.path_params["name"]
        service.check_model(name, strict=True)
        return JSONResponse(_model(service, name))

    @add_route(app, "GET", "/health")
    @add_route(app, "GET", "/ping")
    async def health(request: Request) -> Response:
        """Return whether the engine computes."""
        error = _fault(service)
        return Response(status_code=200) if error is None else error_response(error)

    @add_route(app, "GET", "/ready")
    async def ready(request: Request) -> Response:
        """Return whether requests are taken."""
        error = _fault(service)
        if error is None and service.engine.draining:
            error = ApiError(SHUTTING_DOWN, "the server is shutting down", retry_after=RETRY_SECONDS)
        return Response(status_code=200) if error is None else error_response(error)

    @add_route(app, "GET", "/v1/sessions")
    async def sessions(request: Request) -> Response:
        """List the conversations that are remembered, the most recently used first."""
        found = await service.sessions(request.state.tenant)
        return JSONResponse({"object": "list", "data": [_session(each) for each in found]})

    @add_route(app, "DELETE", "/v1/sessions/{name:path}")
    async def delete_session(request: Request) -> Response:
        """Forget a conversation."""
        name, tenant = request.path_params["name"], request.state.tenant
        if not await service.engine.call(service.llm.drop_session, name, tenant=tenant):
            raise ApiError("not_found", f"there is no session {name!r:.80}")
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    @add_route(app, "GET", "/load")
    async def load(request: Request) -> Response:
        """Return how much is in progress."""
        queued, tokens = service.engine.num_queued()
        total = service.engine.num_unfinished
        return JSONResponse(
            {
                "server_load": total,
                "num_requests_running": total - queued,
                "num_requests_waiting": queued,
                "num_tokens_waiting": tokens,
            }
        )

    @add_route(app, "GET", "/version")
    async def version(request: Request) -> Response:
        """Return the version of Winnow."""
        return JSONResponse({"version": __version__})

    @add_route(app, "GET", "/metrics")
    async def metrics(request: Request) -> Response:
        """Return what Prometheus reads."""
        text = service.metrics.render(await service.stats(), service.engine.by_tenant())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @add_route(app, "POST", "/tokenize")
    async def tokenize_route(request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        return StrictResponse(await tokenize(service, await read_json(request), request.state.tenant))

    @add_route(app, "POST", "/detokenize")
    async def detokenize_route(request: Request) -> Response:
        """Return the text of tokens."""
        return StrictResponse(await detokenize(service, await read_json(request)))


def _fault(service: Service) -> ApiError | None:
    if service.engine.failure is not None:
        return ApiError(UNHEALTHY, "the engine has failed")
    if service.engine.stuck_for() > service.config.step_timeout:
        return ApiError(UNHEALTHY, "a step of the engine does not end")
    return None


def _session(found: SessionStats) -> dict[str, Any]:
    values = asdict(found)
    del values["tenant"]
    return {"id": values.pop("name"), "object": "session", **values}


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "winnow",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.llm.max_model_len,
        "sampling_defaults": dict(service.llm.sampling_defaults),
    }
