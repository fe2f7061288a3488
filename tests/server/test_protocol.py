"""HTTP itself: what fills the memory is cut off, what hides a request is refused, what clients send is read.

A parser that takes h11's place must hold these too. uvicorn's httptools loses the body of a request that offers an
upgrade, and bounds no head.
"""

import socket

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server: Running) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def taken(server: Running, begin: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """Bytes that were sent before the server closed the connection, and what it said."""
    sent, answer = 0, b""
    with connect(server) as connection:
        try:
            connection.sendall(begin)
            while sent < most:
                connection.sendall(piece)
                sent += len(piece)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        except (BrokenPipeError, ConnectionResetError):
            pass
    return sent, answer


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"", b"\r\n"),
        (b"GET /", b"a"),
        (HEAD + b"X-Big: ", b"a"),
        (HEAD + b"X", b"a"),
        (HEAD, b"X-Many: a\r\n"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Trailer: a\r\n"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a"),
    ],
)
def test_what_does_not_end_is_cut_off(server: Running, begin: bytes, piece: bytes) -> None:
    most = 64 * 2**20  # far more than sockets hold
    sent, answer = taken(server, begin, piece * 2**16, most)
    assert sent < most and b" 200 " not in answer
    assert server.client.get("/health").status_code == 200


def test_a_head_within_the_bound_is_taken(server: Running) -> None:
    """Also one that comes in pieces, and again on the same connection."""
    with connect(server) as connection:
        for _ in range(3):
            connection.sendall(HEAD)
            for _ in range(50):
                connection.sendall(b"X-Some: " + b"a" * 1000 + b"\r\n")
            connection.sendall(b"\r\n")
            assert b" 200 " in connection.recv(65536)


def test_a_long_body_is_no_head(server: Running) -> None:
    """A body is bounded by --max-body alone, whole or in chunks."""
    prompt = "a " * 10**5
    for content in (
        f'{{"prompt": "{prompt}"}}'.encode(),
        (part.encode() for part in ('{"prompt": "', prompt, '"}')),
    ):
        headers = {"content-type": "application/json"}
        response = server.client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 400 and "context" in response.text


def test_requests_that_wait_on_a_connection_are_answered_in_turn(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall((HEAD + b"\r\n") * 4)
        answer = b""
        while answer.count(b" 200 ") < 4:
            part = connection.recv(65536)
            assert part, answer
            answer += part


def test_an_upgrade_is_passed_over(server: Running) -> None:
    """Java's client asks for HTTP/2 with every first request; the connection serves on."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(POST + upgrade + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
            answer = b""
            while b'"usage"' not in answer:
                part = connection.recv(65536)
                assert part, answer
                answer += part
            assert b" 200 " in answer


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Content-Length: +5\r\n",
        b"X-A : b\r\n",
    ],
)
def test_heads_that_proxies_read_otherwise_are_refused(server: Running, head: bytes) -> None:
    """Where two readers disagree about a request's end, one request can be hidden in another."""
    with connect(server) as connection:
        connection.sendall(POST + head + b"\r\n0\r\n\r\n")
        assert b" 400 " in connection.recv(65536).partition(b"\r\n")[0]
