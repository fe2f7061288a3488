"""A server with the demo model, in this process, on a port of its own."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from winnow.openai.answers import AnswerReader
from winnow.server.access import Keys
from winnow.server.config import ServerConfig
from winnow.server.listening import bound_sockets
from winnow.server.server import Server
from winnow.server.service import Service

MODEL = "winnow-demo"


class Running:
    """A server that runs in a thread."""

    def __init__(self, llm: Any, config: ServerConfig, keys: dict[str, str], template: Any = None) -> None:
        config = replace(config, port=0, log_level="warning", shutdown_timeout=config.shutdown_timeout)
        reader = AnswerReader.of(getattr(llm, "tokenizer", None), template)
        self.address = ""
        self.started = threading.Event()

        def build() -> None:
            self.service = Service(llm, config, Keys(keys), (MODEL, "other-name"), reader)
            self.server = Server(self.service, self._has_started)
            with bound_sockets(config) as sockets:
                self.server.run(sockets)

        self.thread = threading.Thread(target=build, daemon=True)
        self.thread.start()
        assert self.started.wait(60), "the server did not start"
        self.client = httpx.Client(base_url=self.address, timeout=60)

    def _has_started(self, address: str) -> None:
        self.address = address
        self.started.set()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.client.close()
        assert not self.thread.is_alive(), "the server did not end"


@contextmanager
def running(
    llm: Any, keys: dict[str, str] | None = None, template: Any = None, **options: Any
) -> Iterator[Running]:
    server = Running(llm, ServerConfig(**options), keys or {}, template)
    try:
        yield server
    finally:
        server.stop()


def events(text: str) -> list[Any]:
    """The data of server-sent events, read as JSON; the last must be [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


def eventually(holds: Callable[[], bool], what: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)
