"""Layer between the socket and the routes: request ids, limits, keys, JSON, server-sent events."""

import asyncio
import logging
import math
import re
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow.anthropic.messages import error_body, speaks_anthropic, status_of
from winnow.openai.errors import QUOTA, ApiError
from winnow.server.access import Keys, Sites
from winnow.values.json_values import json_kind, parse_strict
from winnow.values.units import format_bytes

T = TypeVar("T")

log = logging.getLogger("winnow.server")

PING_SECONDS = 10.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def error_response(error: ApiError, path: str = "", request_id: str | None = None) -> Response:
    """Return the response that says an error, in the envelope of OpenAI, or of Anthropic or Ollama on their paths."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.code == QUOTA:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if speaks_anthropic(path):
        return JSONResponse(error_body(error, request_id), status_of(error), headers)
    if path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, error.status, headers)
    return JSONResponse(error.body(), error.status, headers)


@dataclass
class Gate:
    """ASGI middleware: gives every request an id, checks whose it is, and bounds its body.

    Attributes:
        open_paths: served without a key.
        require_usable: raises where nothing new is answered; what only reads is served all the same.
        max_body: most bytes of a body, by path.
    """

    app: ASGIApp
    keys: Keys
    sites: Sites
    open_paths: Collection[str]
    require_usable: Callable[[], None]
    max_body: Callable[[str], int]
    logs: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not self.logs:
            await self._serve(scope, receive, send)
        else:
            began, status = time.monotonic(), 499

            async def send_noted(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await self._serve(scope, receive, send_noted)
            finally:
                _log_request(scope, status, time.monotonic() - began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        state = scope.setdefault("state", {})
        state["request_id"], state["tenant"] = request_id, None
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if speaks_anthropic(path):
                    MutableHeaders(scope=message)["request-id"] = request_id
            await send(message)

        path, most = scope["path"], self.max_body(scope["path"])
        if scope["method"] == "HEAD":  # answered as GET; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        try:
            self.sites.require_own(scope["method"], headers)
            if path not in self.open_paths:
                state["tenant"] = self.keys.tenant(headers.get("authorization"), headers.get("x-api-key"))
            if scope["method"] in ("POST", "DELETE"):
                self.require_usable()
            length = headers.get("content-length", "0")
            if length.isdigit() and int(length[:20]) > most:
                raise _too_large(most)
            decoder = _decoder(headers) if scope["method"] == "POST" else None
            await self.app(scope, _bounded(receive, most, decoder), send_named)
        except ApiError as error:
            if started:
                raise
            await error_response(error, path, request_id)(scope, receive, send_named)


def _log_request(scope: Scope, status: int, seconds: float) -> None:
    state = scope["state"]
    stream, tenant = state.get("stream"), state["tenant"]
    tokens = ""
    if stream is not None:
        prompts = sum(len(each.token_ids) for each in stream.requests)
        tokens = f", {prompts} + {stream.generated.total()} tokens"
    who = state["request_id"] if tenant is None else f"{state['request_id']} of {tenant}"
    log.info("%s: %s %s %d in %.3f s%s", who, scope["method"], scope["path"], status, seconds, tokens)


class _Inflater:
    """Reader of a body that is compressed in gzip's or zlib's form."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either form, by its header

    def read(self, data: bytes, most: int, *, last: bool) -> bytes:
        """Return what more of a body comes to, at most one byte beyond a limit. Raises ApiError: it is damaged."""
        found = b""
        try:
            while data and len(found) <= most:
                if self._inflate.eof:  # gzip's files may stand one behind another
                    self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
                found += self._inflate.decompress(data, most + 1 - len(found))
                data = self._inflate.unconsumed_tail or self._inflate.unused_data
        except zlib.error as error:
            raise ApiError("invalid_request", f"the body is not {self._encoding}: {error}") from None
        if last and len(found) <= most and not self._inflate.eof:
            raise ApiError("invalid_request", f"the body ends before its {self._encoding} does")
        return found


def _decoder(headers: Headers) -> _Inflater | None:
    given = ", ".join(headers.getlist("content-encoding")).strip().lower()
    if given in ("", "identity"):
        return None
    if given not in ("gzip", "x-gzip", "deflate"):
        fault = f"Content-Encoding must be gzip, deflate or identity, got {given!r:.80}"
        raise ApiError("unsupported_media_type", fault)
    return _Inflater(given)


def _bounded(receive: Receive, most: int, decoder: _Inflater | None) -> Receive:
    """Return `receive`, up to a limit of bytes, compressed or not: a body need not say how long it is."""
    taken = inflated = 0

    async def receive_bounded() -> Message:
        nonlocal taken, inflated
        message = await receive()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            taken += len(body)
            if decoder is not None and taken <= most:
                last = not message.get("more_body", False)
                body = decoder.read(body, most - inflated, last=last)
                message = {**message, "body": body}
                inflated += len(body)
            if max(taken, inflated) > most:
                raise _too_large(most)
        return message

    return receive_bounded


def _too_large(most: int) -> ApiError:
    return ApiError("request_too_large", f"the body must be at most {format_bytes(most)}")


async def read_json(request: Request) -> dict[str, Any]:
    # Also where there is none: a page of another site could send that without asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError("unsupported_media_type", f"content-type must be application/json, got {kind!r:.80}")
    data = await request.body()
    try:
        body = parse_strict(data)
    except ValueError as error:
        raise ApiError("invalid_json", f"the body: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("invalid_request", f"the body must be an object, got {json_kind(body)}")
    return body


async def read_turn(request: Request) -> dict[str, Any]:
    """Read a JSON object, with the header X-Session-ID as a field."""
    body = await read_json(request)
    session = request.headers.get("x-session-id")
    return body if session is None else {"session_id": session} | body


class ClientLeft(Exception):  # noqa: N818 (no error: the client has closed its connection)
    pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, or cancel it and raise ClientLeft when the client leaves."""
    task = asyncio.create_task(work)
    listener = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for each in (task, listener):
            each.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. Ends at once when the client leaves, also while there is nothing to send.

    Clients and proxies give a silent stream up, and a long prompt takes minutes: `ping` breaks silences, none of which
    is longer than `PING_SECONDS`. `close` is called when the stream has ended, however that came about.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        close: Callable[[], None] = lambda: None,
        ping: str = ": ping\n\n",
        media_type: str = media_type,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._ping = ping.encode()
        self._silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except (ClientLeft, OSError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pinger = asyncio.create_task(self._break_silence(send))
        try:
            async for event in self._events:
                self._silent = False
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _break_silence(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS / 2)
            if self._silent:
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            self._silent = True
