"""Addresses that cannot be listened on are refused in one line, before a model is loaded."""

import os
import resource
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import eventually, running

from winnow import LLM
from winnow.cli import serve
from winnow.cli.main import main
from winnow.errors import ConfigError
from winnow.server.config import ServerConfig
from winnow.server.listening import bound_sockets


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `winnow serve`; return its one line of error. Nothing is loaded."""
    monkeypatch.delenv("WINNOW_API_KEY", raising=False)

    def load(options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(serve.engine, "open_llm", load)

    def run(*arguments: Any) -> str:
        assert main(["serve", *map(str, arguments)]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("winnow: error: ") and shown.count("\n") == 1
        return shown

    return run


def test_a_port_that_is_taken(refused: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be listened on: Address already in use" in refused("--port", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 80])
def test_a_host_that_is_not_here(refused: Any, host: str) -> None:
    assert f"host {host!r}" in refused("--host", host, "--port", 0)


def test_unix_sockets(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert f"uds {str(file)!r} cannot be listened on: it is there, and no socket" in refused("--uds", file)
    assert file.read_text() == "mine"
    assert "No such file or directory" in refused("--uds", tmp_path / "missing" / "socket")
    assert "too long" in refused("--uds", tmp_path / ("x" * 200))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "no socket" in refused("--uds", tmp_path / "link")
    with bound_sockets(ServerConfig(uds=str(tmp_path / "live"))):
        assert "Address already in use" in refused("--uds", tmp_path / "live")
    assert not (tmp_path / "live").exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bound_sockets(ServerConfig(uds=str(path))) as [bound]:
        assert bound.getsockname() == str(path) and os.stat(path).st_mode & 0o777 == 0o666


def test_every_address_of_a_name_has_the_same_port() -> None:
    with bound_sockets(ServerConfig(host="localhost", port=0)) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1


def test_a_port_that_is_taken_while_the_model_loads(llm: LLM) -> None:
    """Two servers that start at once may both bind; one of them listens."""
    config = ServerConfig(port=0)
    with running(llm) as server:
        config = ServerConfig(port=server.server.servers[0].sockets[0].getsockname()[1])
        with pytest.raises(ConfigError, match="Address already in use"), bound_sockets(config):
            pass


def test_more_connections_than_the_soft_limit(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The soft limit rises at start. Where even the hard one is reached, one line says so, and the loop rests."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
    clients: list[socket.socket] = []
    try:
        with running(llm) as server:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
            address = ("127.0.0.1", server.client.base_url.port)
            with caplog.at_level("ERROR"), suppress(OSError):
                while True:
                    clients.append(socket.create_connection(address, 5))
            eventually(lambda: bool(caplog.records), "nothing was said")
            time.sleep(1.2)
            assert ["connections wait: Too many open files" in each.message for each in caplog.records] == [
                True
            ]
            while clients:
                clients.pop().close()
            eventually(lambda: server.client.get("/health").status_code == 200, "it does not recover")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", ["host", "uds"])
def test_an_empty_address_is_not_every_interface(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not be empty"):
        ServerConfig(**{name: ""})


@pytest.mark.parametrize("text", ["{}", '{"": "key"}', '{"a": ""}', '{"a": " key"}', "null"])
def test_keys_that_are_none(refused: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    shown = refused("--api-keys-file", path)
    assert "api_keys_file" in shown or "the key of tenant 'a' must be" in shown


@pytest.mark.parametrize("value", ["", " ", "key\n"])
def test_a_variable_without_a_key(refused: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WINNOW_API_KEY", value)
    shown = refused()
    assert "WINNOW_API_KEY must hold a key" in shown if not value else "must be printable ASCII" in shown
