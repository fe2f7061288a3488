"""The routes that every server has."""

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from winnow.openai.errors import SHUTTING_DOWN, UNHEALTHY, ApiError, invalid
from winnow.openai.request import Endpoint, read_messages, take_text
from winnow.openai.tools import read_template_options, read_tools
from winnow.outputs import SessionStats
from winnow.server.async_engine import RETRY_SECONDS
from winnow.server.endpoints.completions import StrictResponse, complete
from winnow.server.endpoints.messages import count_tokens, create_message
from winnow.server.endpoints.responses import respond
from winnow.server.forms import add_route, check_body
from winnow.server.http import error_response, read_json, read_turn
from winnow.server.service import Service
from winnow.values.json_values import json_kind
from winnow.version import __version__


def add_routes(app: FastAPI, service: Service) -> None:
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
    async def models() -> Response:
        """List the model under each of its names."""
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.names]})

    @add_route(app, "GET", "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describe the model."""
        service.check_model(name, strict=True)
        return JSONResponse(_model(service, name))

    @add_route(app, "GET", "/health")
    @add_route(app, "GET", "/ping")
    async def health() -> Response:
        """Return whether the engine computes."""
        return _state(_fault(service))

    @add_route(app, "GET", "/ready")
    async def ready() -> Response:
        """Return whether requests are taken."""
        error = _fault(service)
        if error is None and service.engine.draining:
            error = ApiError(SHUTTING_DOWN, "the server is shutting down", retry_after=RETRY_SECONDS)
        return _state(error)

    @add_route(app, "GET", "/v1/sessions")
    async def sessions(request: Request) -> Response:
        """List the conversations that are remembered, the most recently used first."""
        found = await service.sessions(request.state.tenant)
        return JSONResponse({"object": "list", "data": [_session(each) for each in found]})

    @add_route(app, "DELETE", "/v1/sessions/{name:path}")
    async def delete_session(request: Request, name: str) -> Response:
        """Forget a conversation."""
        if not await service.engine.call(service.llm.drop_session, name, tenant=request.state.tenant):
            raise ApiError("not_found", f"there is no session {name!r:.80}")
        return JSONResponse({"id": name, "object": "session", "deleted": True})

    @add_route(app, "GET", "/load")
    async def load() -> Response:
        """Return how much is in progress."""
        queued, tokens = service.engine.num_queued()
        total = service.engine.num_unfinished
        found = {"server_load": total, "num_requests_running": total - queued}
        return JSONResponse(found | {"num_requests_waiting": queued, "num_tokens_waiting": tokens})

    @add_route(app, "GET", "/version")
    async def version() -> Response:
        """Return the version of Winnow."""
        return JSONResponse({"version": __version__})

    @add_route(app, "GET", "/metrics")
    async def metrics() -> Response:
        """Return what Prometheus reads."""
        text = service.metrics.render(await service.stats(), service.engine.by_tenant())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @add_route(app, "POST", "/tokenize")
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a text, or of a conversation."""
        body = await read_json(request)
        service.check_model(take_text(body, "model"))
        names = body.pop("return_token_strs", False)
        special = body.pop("add_special_tokens", True)
        if "messages" in body:
            messages = read_messages(body.pop("messages"))
            tools, _ = read_tools(body)
            template = read_template_options(body, tools)
            _refuse_fields(body)
            ids = (await service.tokenize_chat(messages, template, request.state.tenant)).token_ids
        else:
            text = body.pop("prompt", None)
            _refuse_fields(body)
            if not isinstance(text, str):
                raise invalid("prompt", f"must be text, got {json_kind(text)}")
            ids = (await service.tokenize(text, special=bool(special))).token_ids if text else []
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
        if names:
            tokenizer = service.llm.tokenizer
            found["token_strs"] = tokenizer.convert_ids_to_tokens(ids) if tokenizer else []
        return StrictResponse(found)

    @add_route(app, "POST", "/detokenize")
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        body = await read_json(request)
        check_body("/detokenize", body)
        service.check_model(body.get("model"))
        ids, tokenizer = body["tokens"], service.llm.tokenizer
        if tokenizer is None:
            raise ApiError("invalid_request", "the model has no tokenizer")
        if ids and max(ids) >= service.llm.vocab_size:
            raise invalid("tokens", f"must be below {service.llm.vocab_size}, got {max(ids)}")
        text = await service.off_loop(lambda: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return StrictResponse({"prompt": text})


def _refuse_fields(body: dict[str, Any]) -> None:
    for unknown in body:
        raise invalid(f"{unknown!r:.80}", "is not a field of this request", unknown[:80])


def _state(error: ApiError | None) -> Response:
    return Response(status_code=200) if error is None else error_response(error)


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
        "sampling_defaults": dict(service.llm.conversation_defaults),
    }
