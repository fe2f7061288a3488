"""The process around the app: sockets, signals, and how it ends."""

import asyncio
import logging
import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from winnow.openai.errors import SHUTTING_DOWN, ApiError
from winnow.server.app import create_app
from winnow.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("winnow.server")

_MAX_HEADER_BYTES = 64 * 1024
_MAX_PENDING_CONNECTIONS = 2048
_KEEP_ALIVE_SECONDS = 75
FAILED = 1
"""Exit code of a server whose engine has failed."""


class Server(uvicorn.Server):
    """Serves until a signal ends it, and lets requests in progress finish first."""

    def __init__(self, service: Service, started: "Callable[[str], None]") -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=config.host,
                port=config.port,
                uds=config.uds,
                log_level=config.log_level,
                access_log=config.log_level == "debug",
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                http="h11",  # whose limits on headers are set here
                ws="none",
                backlog=_MAX_PENDING_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                server_header=False,
            )
        )
        self._service = service
        self._started = started
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: "list[object] | None" = None) -> None:  # type: ignore[override]
        """Start to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._watch(self._end_after_failure())
            self._started(self.address)

    @property
    def address(self) -> str:
        """Where it listens."""
        config = self._service.config
        if config.uds is not None:
            return f"unix:{config.uds}"
        port = self.servers[0].sockets[0].getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end at once at the second."""
        engine = self._service.engine
        if engine.draining and sig == signal.SIGINT:
            self.force_exit = True
        if not engine.draining:
            engine.draining = True
            if engine.num_unfinished:
                log.info("%d answers in progress are finished first", engine.num_unfinished)
            assert self._loop is not None, "signals are handled once the loop runs"
            self._loop.call_soon_threadsafe(lambda: self._watch(self._give_up_late()))
        self.should_exit = True

    async def _give_up_late(self) -> None:
        await asyncio.sleep(self._service.config.shutdown_timeout)
        self._service.engine.abort_all(ApiError(SHUTTING_DOWN, "the server is shutting down"))

    async def _end_after_failure(self) -> None:
        await self._service.exit.wait()
        log.error("the engine has failed: the server ends")
        await asyncio.sleep(_LAST_WORDS)
        self.should_exit = True

    def _watch(self, work: "object") -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_LAST_WORDS = 1.0
"""Seconds in which /health can be asked after a failure."""


def serve(service: Service, started: "Callable[[str], None]" = lambda address: None) -> int:
    """Serve until a signal or a failure of the engine. Returns the exit code."""
    server = Server(service, started)
    server.run()
    if service.config.uds is not None and os.path.exists(service.config.uds):
        os.unlink(service.config.uds)
    if not server.started:
        return 2
    return FAILED if service.engine.failure is not None else 0
