"""The process around the app: sockets, signals, and how it ends."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any

import uvicorn

from winnow.openai.errors import SHUTTING_DOWN, ApiError
from winnow.process.resources import raise_open_files
from winnow.server.app import create_app
from winnow.server.async_engine import RETRY_SECONDS
from winnow.server.listening import cannot_listen
from winnow.server.service import Service

log = logging.getLogger("winnow.server")

_MAX_HEADER_BYTES = 64 * 1024
_MAX_PENDING_CONNECTIONS = 2048
_ACCEPTED_AT_ONCE = 16
"""asyncio reports each of these that fails, a second later again."""
_SAID_AGAIN_SECONDS = 60.0
_KEEP_ALIVE_SECONDS = 75
_WRITING_SECONDS = 5
"""For what was computed to reach clients that read slowly, once the last answer has ended."""
_POLL_SECONDS = 0.02
_LAST_WORDS = 1.0
"""Seconds in which /health can be asked after a failure."""
FAILED = 1
"""Exit code of a server whose engine has failed."""


class Server(uvicorn.Server):
    """Server that runs until a signal ends it, and lets requests in progress finish first."""

    def __init__(self, service: Service, started: Callable[[str], None]) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,  # the process's own
                log_level="debug" if config.log_level == "debug" else "warning",
                access_log=config.log_level == "debug",
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                http="h11",  # whose limits on headers are set here
                ws="none",
                backlog=_ACCEPTED_AT_ONCE,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_WRITING_SECONDS,
                server_header=False,
            )
        )
        self._service = service
        self._started = started
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._said_at = -_SAID_AGAIN_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._open_files = raise_open_files()
        self._loop.set_exception_handler(self._handle_exception)
        try:
            await super().startup(sockets)
            for each in sockets or ():
                each.listen(_MAX_PENDING_CONNECTIONS)
        except OSError as error:  # another server has begun to listen there since the sockets were bound
            await self.lifespan.shutdown()
            raise cannot_listen(self._service.config, error) from None
        if self.started:
            self._watch(self._end_after_failure())
            config = self._service.config
            address = f"unix:{config.uds}"
            if config.uds is None:
                host = f"[{config.host}]" if ":" in config.host else config.host
                address = f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}"
            self._started(address)

    def _handle_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say once that connections wait for a free descriptor; asyncio tries again each second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._said_at >= _SAID_AGAIN_SECONDS:
            self._said_at = loop.time()
            log.error(
                "connections wait: %s (limit of open files %s)", os.strerror(error.errno), self._open_files
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end at once at the second Ctrl-C."""
        engine = self._service.engine
        if self._loop is None:
            self.should_exit = True
        elif not engine.draining:
            engine.draining = True
            if engine.num_unfinished:
                log.info("%d answers in progress are finished first", engine.num_unfinished)
            self._loop.call_soon_threadsafe(lambda: self._watch(self._drain()))
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        # Meanwhile new connections are taken, to refuse what they ask.
        engine = self._service.engine
        loop = asyncio.get_running_loop()
        end = loop.time() + self._service.config.shutdown_timeout
        ending = ApiError(SHUTTING_DOWN, "the server is shutting down", retry_after=RETRY_SECONDS)
        engine.abort_all(ending, waiting=True)
        while engine.num_unfinished and loop.time() < end:
            await asyncio.sleep(_POLL_SECONDS)
        engine.abort_all(ending)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.ending.set()
        await super().shutdown(sockets)

    async def _end_after_failure(self) -> None:
        await self._service.exit.wait()
        log.error("the engine has failed: the server ends")
        await asyncio.sleep(_LAST_WORDS)
        self.should_exit = True

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def serve(service: Service, sockets: Sequence[socket.socket], started: Callable[[str], None]) -> int:
    """Serve on bound sockets until a signal or a failure of the engine. Returns the exit code."""
    server = Server(service, started)
    server.run(list(sockets))
    if not server.started:
        return 2
    return FAILED if service.engine.failure is not None else 0
