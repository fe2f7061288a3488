"""Winnow's server as an application of Ray Serve, in the form of Ray's own for LLMs (`ray.serve.llm`).

Each replica has an engine and the server's ASGI app. What stands before them reads bodies alone: Ray's router goes by
the prompt, and sends what begins alike to the same replica.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

from winnow.config import EngineConfig
from winnow.errors import ConfigError
from winnow.llm import LLM
from winnow.server.access import Keys
from winnow.server.app import create_app
from winnow.server.config import ServerConfig
from winnow.server.service import Service, load_reader, model_names
from winnow.values.json_values import dump_json

# The public name, ray.serve.llm.request_router, cannot be imported without vLLM or SGLang.
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
_SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "client", "server", "headers"),
)
_PROMPTS = ("messages", "prompt", "input")
_Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """A request on its way to a replica: the router compares prompts, and `scope` is ASGI's plain data."""

    prompt: str
    scope: Mapping[str, Any]
    body: bytes


def build_app(
    engine: Mapping[str, Any],
    server: Mapping[str, Any] | None = None,
    *,
    min_replicas: int = 1,
    max_replicas: int = 1,
    target_queued_tokens: int = 8192,
    resources: Mapping[str, Any] | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    router: str = ROUTER,
) -> serve.Application:
    """Return an application for `serve.run` or a config file of Ray Serve. Raises ConfigError: an option is unknown,
    out of range or means nothing here.

    Args:
        engine: options of `winnow.LLM`.
        server: those of `winnow serve`, by their names in `ServerConfig`; addresses mean nothing here.
        target_queued_tokens: prompt tokens that wait for a place, for each of which one more replica starts.
        resources: of a replica, in the words of `ray.remote`, such as {"num_cpus": 8} or {"num_gpus": 1}.
        autoscaling: further fields of Ray's `AutoscalingConfig`, such as {"downscale_delay_s": 300}.
        router: import path of a request router of Ray Serve.
    """
    seats = EngineConfig.from_options(dict(engine)).scheduler.max_num_seqs
    config = ServerConfig(**dict(server or {}))
    if config.files_dir is not None:
        raise ConfigError(f"files_dir means nothing to several replicas, got {config.files_dir!r}")
    if target_queued_tokens < 1:
        raise ConfigError(f"target_queued_tokens must be at least 1, got {target_queued_tokens}")

    policy = AutoscalingPolicy(
        policy_function=f"{__name__}:QueuedTokensPolicy", policy_kwargs={"target": target_queued_tokens}
    )
    scaling = AutoscalingConfig(
        min_replicas=min_replicas, max_replicas=max_replicas, policy=policy, **(autoscaling or {})
    )
    # Requests wait in the engine, which says how many tokens that are.
    most = 2 * seats + (config.max_num_queued_reqs or 2**20)
    replica = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": 1} | dict(resources or {}),
        max_ongoing_requests=most,
        autoscaling_config=scaling,
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    front = serve.deployment(
        Front, max_ongoing_requests=most * max_replicas, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replica.bind(dict(engine), dict(server or {}), seats), config.max_body)


class QueuedTokensPolicy:
    """Autoscaling policy: as many replicas as are busy, and one more for each `target` tokens that wait."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        # Ray bounds and delays the number; there is no state.
        found = context.aggregated_metrics or {}
        busy, queued = (sum(found.get(name, {}).values()) for name in ("busy_share", "queued_tokens"))
        return math.ceil(busy) + math.ceil(queued / self._target), {}


class Replica:
    # Ray Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, engine: Mapping[str, Any], server: Mapping[str, Any], seats: int
    ) -> None:
        llm, config = LLM(**engine), ServerConfig(**server)
        self._service = Service(
            llm,
            config,
            Keys.of(config.api_key, config.api_keys_file),
            model_names(engine.get("model"), config.served_model_name),
            load_reader(config.response_template, llm.tokenizer),
        )
        self._seats = seats
        self._app = create_app(self._service)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        await self._lifespan.__aexit__(None, None, None)

    async def answer(self, asked: Asked) -> AsyncIterator[_Message]:
        sent: asyncio.Queue[_Message | None] = asyncio.Queue()
        body, left = [asked.body], asyncio.Event()

        async def receive() -> _Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(dict(asked.scope), receive, sent.put)
            finally:
                await sent.put(None)

        running = asyncio.ensure_future(run())
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:  # also when the client has left
            left.set()
            await running

    def record_autoscaling_stats(self) -> dict[str, float]:
        answers, tokens = self._service.engine.num_queued()
        running = self._service.engine.num_unfinished - answers
        return {"queued_tokens": float(tokens), "busy_share": running / self._seats}

    def check_health(self) -> None:
        self._service.engine.require_usable()


class Front:
    def __init__(self, replicas: serve.handle.DeploymentHandle, max_body: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_body = max_body

    async def __call__(self, request: Request) -> StreamingResponse:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:  # the replica refuses it
                break
        scope = {name: value for name, value in request.scope.items() if name in _SCOPE}
        messages = self._replicas.answer.remote(Asked(_prompt(request.url.path, body), scope, body))
        start = await anext(messages)

        async def parts() -> AsyncIterator[bytes]:
            async for message in messages:
                yield message.get("body", b"")

        response = StreamingResponse(parts(), start["status"])
        response.raw_headers = list(start["headers"])
        return response


def _prompt(path: str, body: bytes) -> str:
    try:
        asked = json.loads(body)
        return dump_json(next(asked[name] for name in _PROMPTS if asked.get(name)))
    except (ValueError, AttributeError, TypeError, StopIteration, RecursionError):
        return path
