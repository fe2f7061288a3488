"""A page of another site changes nothing, reads nothing, and computes nothing on a server without keys."""

from pathlib import Path

import pytest
from tests.server.running import Running, running

from winnow import LLM
from winnow.server.access import Keys, Sites
from winnow.server.config import ServerConfig

PAGE = {"origin": "https://pages.example"}
FILE = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.mark.parametrize(
    "headers",
    [
        PAGE,
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "https://[bad"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", **PAGE},
    ],
)
def test_pages_of_other_sites_change_nothing(server: Running, headers: dict[str, str]) -> None:
    client = server.client
    kept = client.post("/v1/files", **FILE).json()["id"]  # type: ignore[arg-type]
    before = client.get("/v1/files").json()
    asked = [
        client.post("/v1/files", headers=headers, **FILE),  # type: ignore[arg-type]
        client.delete(f"/v1/files/{kept}", headers=headers),
        client.post("/v1/batches/batch_x/cancel", headers=headers),
        client.post("/v1/batches", json={}, headers=headers),
        client.post("/v1/completions", json=BODY, headers=headers),
        client.post("/tokenize", json={"prompt": "a"}, headers=headers),
    ]
    assert [each.status_code for each in asked] == [403] * len(asked)
    assert asked[0].json()["error"]["code"] == "cross_site"
    assert client.get("/v1/files", headers=headers).json() == before


def test_own_pages_and_other_clients_are_served(server: Running) -> None:
    own = {"origin": server.address}
    for headers in ({}, own, own | {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        assert server.post("/v1/completions", BODY, headers=headers).status_code == 200
    # A proxy may give the server another name; the browser knows whose page it is.
    proxied = {"origin": "https://llm.example", "sec-fetch-site": "same-origin"}
    assert server.post("/v1/completions", BODY, headers=proxied).status_code == 200


@pytest.mark.parametrize(
    "host", ["pages.example", "127.0.0.1.pages.example", "10.0.0.1:80", "[::2]", "[bad", ""]
)
def test_another_sites_name_for_a_loopback_server(server: Running, host: str) -> None:
    for path in ("/v1/models", "/metrics", "/"):
        assert server.client.get(path, headers={"host": host}).status_code == 403
    assert server.post("/v1/completions", BODY, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:80", "LOCALHOST", "winnow.localhost", "127.0.0.2", "[::1]:9"])
def test_names_of_loopback(server: Running, host: str) -> None:
    assert server.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_what_is_reached_by_a_name_or_asks_for_a_key_is_not_checked_by_name(llm: LLM, tmp_path: Path) -> None:
    with running(llm, {"a": "key-a"}) as server:
        headers = {"authorization": "Bearer key-a", "host": "llm.example", **PAGE}
        assert server.post("/v1/completions", BODY, headers=headers).status_code == 200
    for config in (ServerConfig(host="192.0.2.1"), ServerConfig(uds=str(tmp_path / "socket"))):
        Sites(config, Keys({})).require_own("GET", _Headers({"host": "llm.example"}))


class _Headers(dict[str, str]):
    """What is read of Starlette's headers."""
