"""A tenant is charged what was computed for it, also where its client has left."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from tests.server.running import Running, eventually, running

from winnow import LLM

HEADERS = {"authorization": "Bearer key-a"}
PROMPT = list(range(100, 150))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000, "ignore_eos": True}
LONG = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, {"a": "key-a"}) as server:
        yield server


@pytest.fixture
def charged(server: Running) -> Any:
    """Tokens that the tenant was charged since the test began: of prompts, of answers."""

    def read() -> tuple[int, int]:
        counts = server.service.metrics._by_tenant
        return counts.get(("a", "prompt"), 0), counts.get(("a", "generation"), 0)

    before = read()
    return lambda: tuple(now - then for now, then in zip(read(), before, strict=True))


def leave(server: Running, path: str, body: dict[str, Any]) -> None:
    """Ask, and go while the answer is computed."""
    computed = server.service.llm.stats().generated_tokens
    with (
        suppress(httpx.ReadTimeout),
        httpx.Client(base_url=server.address, timeout=0.4) as client,
        client.stream("POST", path, json=body, headers=HEADERS) as response,
    ):
        next(response.iter_lines())
    assert server.service.llm.stats().generated_tokens > computed, "nothing was computed before it left"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", LONG | {"stream": True}),
        ("/v1/completions", LONG | {"prompt": [PROMPT, PROMPT], "n": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3000, "ignore_eos": True}),
    ],
)
def test_clients_that_leave_are_charged(
    server: Running, charged: Any, path: str, body: dict[str, Any]
) -> None:
    before = server.service.llm.stats()
    leave(server, path, body)
    eventually(lambda: charged()[1] > 0, "nothing is charged")
    after = server.service.llm.stats()
    # Every token that was sampled, and no other.
    assert charged()[1] == after.generated_tokens - before.generated_tokens
    assert charged()[0] > 0 if path != "/v1/completions" else charged()[0] % len(PROMPT) == 0 < charged()[0]
    assert not server.service.engine._left


@pytest.mark.parametrize("stream", [False, True])
def test_whole_answers_are_charged_once(server: Running, charged: Any, stream: bool) -> None:
    body = {"prompt": [PROMPT, PROMPT[:10]], "max_tokens": 7, "ignore_eos": True, "n": 2, "stream": stream}
    assert server.post("/v1/completions", body, headers=HEADERS).status_code == 200
    assert charged() == (60, 28)


def test_what_is_refused_is_free(server: Running, charged: Any) -> None:
    for body in ({"prompt": [10**6]}, {"prompt": "a", "max_tokens": -1}, {"prompt": list(range(5, 5000))}):
        assert server.post("/v1/completions", body, headers=HEADERS).status_code == 400
    assert charged() == (0, 0)
    eventually(lambda: not server.service.engine._left, "a request that never came in is remembered")


def test_what_waits_and_is_left_is_free(server: Running, charged: Any) -> None:
    """The engine has room for 16 answers, so the 17th has not begun."""
    with server.client.stream(
        "POST", "/v1/completions", json=LONG | {"n": 16, "stream": True}, headers=HEADERS
    ) as first:
        lines = first.iter_lines()
        assert next(lines)
        with suppress(httpx.ReadTimeout), httpx.Client(base_url=server.address, timeout=0.3) as client:
            client.post("/v1/completions", json=LONG | {"prompt": PROMPT[:7]}, headers=HEADERS)
        eventually(
            lambda: server.client.get("/load", headers=HEADERS).json()["server_load"] == 16, "it is held"
        )
        assert charged() == (0, 0)
    eventually(lambda: charged()[0] > 0, "nothing is charged")
    assert charged()[0] == len(PROMPT)
