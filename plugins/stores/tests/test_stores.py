"""Prefixes in object stores and Redis: found by others, dropped by use, and left alone where a store stalls."""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from test_disk_tier import GREEDY, KVZIP, ask, open_llm, prompt, tier_stats

import winnow_stores
from winnow.errors import ConfigError
from winnow.storage import prefix_files
from winnow.storage.folders import open_folder


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in is found, whether or not it is installed."""
    monkeypatch.setattr("winnow.process.extras.find_plugin", lambda group: winnow_stores.open_remote)


class RedisServer:
    """A server that keeps what it was given over restarts, below a folder."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("needs a server: apt install redis-server, then make test-extras")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {"port": port, "bind": "127.0.0.1", "dir": folder, "requirepass": "secret", "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always"}
        self._command = [
            program,
            *(str(each) for name, value in options.items() for each in (f"--{name}", value)),
        ]
        self.url = f"redis://:secret@127.0.0.1:{port}/0"
        self.start()

    def start(self) -> None:
        import redis

        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client, end = redis.Redis.from_url(self.url), time.monotonic() + 20
        while True:
            try:
                assert client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < end and self.process.poll() is None
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(params=["memory://bucket/prefixes", "redis://user:secret@host/0", "server"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "server":
        yield request.getfixturevalue("redis_server").url
        return
    if request.param.startswith("redis"):
        redis, fakes = pytest.importorskip("redis"), pytest.importorskip("fakeredis")
        server = fakes.FakeServer()
        monkeypatch.setattr(redis.Redis, "from_url", lambda url, **_: fakes.FakeRedis(server=server))
        yield request.param
        return
    memory = pytest.importorskip("fsspec").filesystem("memory")
    yield request.param
    memory.store.clear()


def objects(bucket: str) -> list[str]:
    return list(open_folder(bucket).listing())


def test_what_one_machine_compressed_serves_all(directory: Path, bucket: str) -> None:
    document, params = prompt(150), replace(GREEDY, context_tokens=150)
    options = KVZIP | {"kv_memory": "4MiB"}
    with open_llm(directory, None, **options) as llm:
        expected = ask(llm, document + prompt(5), params)
    with open_llm(directory, bucket, **options) as first:
        ask(first, document + prompt(9, 1), params)
    assert objects(bucket) and "secret" not in str(open_folder(bucket))
    with open_llm(directory, bucket, **options) as second:
        found = ask(second, document + prompt(5), params)
        assert second.stats().num_rounds == second.stats().replay_tokens == 0
    assert found.num_cached_tokens == 150
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_objects_that_others_wrote_meanwhile_are_found(
    directory: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winnow_stores, "_RELIST_SECONDS", 0.0)
    with open_llm(directory, bucket) as early:
        with open_llm(directory, bucket) as other:
            ask(other, prompt(150))
        early._engine.scheduler.memory.files.cached.refresh()
        early._engine.scheduler.memory.files.cached._listing.result()
        assert ask(early, prompt(150)).num_cached_tokens == 148


def test_objects_used_least_recently_go_first(directory: Path, bucket: str) -> None:
    with open_llm(directory, bucket) as llm:
        ask(llm, prompt(150, 0))
        llm._engine.scheduler.memory.files.cached.wait()
        size = tier_stats(llm).bytes_written
    with open_llm(directory, bucket, prefix_cache_disk=int(2.5 * size)) as llm:
        for seed in (1, 0, 2):
            ask(llm, prompt(150, seed))
            llm._engine.scheduler.memory.files.cached.wait()
        assert tier_stats(llm).num_dropped == 1 and len(objects(bucket)) == 2
    with open_llm(directory, bucket, prefix_cache_disk=1) as llm:
        assert [ask(llm, prompt(150, seed)).num_cached_tokens for seed in (0, 1, 2)] == [148, 0, 148]
    with open_llm(directory, bucket) as llm:
        llm.reset_prefix_cache()
    assert not objects(bucket)


class Stalling:
    """A store that fsspec would open, which can stop answering."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.answers = Event()
        self.answers.set()

    def invalidate_cache(self, root: str) -> None: ...

    def ls(self, root: str, detail: bool) -> list[dict[str, Any]]:
        self.answers.wait()
        return [{"name": name, "size": len(content)} for name, content in self.files.items()]

    def cat_file(self, name: str, start: int | None, end: int | None) -> bytes:
        self.answers.wait()
        return self.files[name][start:end]

    def pipe_file(self, name: str, content: bytes) -> None:
        self.answers.wait()
        self.files[name] = content


def test_a_store_that_stalls_keeps_nobody(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("fsspec.core")
    store = Stalling()
    monkeypatch.setattr(core, "url_to_fs", lambda url: (store, "bucket"))
    monkeypatch.setattr(winnow_stores, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(prefix_files, "_RETRY_SECONDS", 0.5)
    monkeypatch.setattr(prefix_files, "_CLOSE_SECONDS", 0.3)
    with open_llm(directory, "stalling://bucket") as llm:
        expected = ask(llm, prompt(150)).outputs[0].token_ids
    assert len(store.files) == 1
    llm = open_llm(directory, "stalling://bucket")
    store.answers.clear()
    with pytest.warns(UserWarning, match="stalling://bucket does not answer, and is left alone"):
        found = ask(llm, prompt(150))
    assert found.outputs[0].token_ids == expected and found.num_cached_tokens == 0
    assert not tier_stats(llm).is_writing
    ask(llm, prompt(40, 3))
    store.answers.set()
    time.sleep(0.6)
    ask(llm, prompt(150, 5))
    llm._engine.scheduler.memory.files.cached.wait()
    assert len(store.files) == 2, "it is written again"
    store.answers.clear()
    ask(llm, prompt(150, 6))
    began = time.monotonic()
    llm.close()
    assert time.monotonic() - began < 5
    store.answers.set()


@pytest.mark.parametrize("trouble", ["stalls", "restarts"])
def test_a_server_in_trouble_ends_no_request(
    directory: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """It answers no more, or is killed; later it has what it had, and is written again by the same process."""
    monkeypatch.setattr(winnow_stores, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(prefix_files, "_RETRY_SECONDS", 0.5)
    with open_llm(directory, redis_server.url) as first:
        expected = ask(first, prompt(150)).outputs[0].token_ids
    with open_llm(directory, redis_server.url) as llm:
        assert len(objects(redis_server.url)) == 1
        if trouble == "stalls":
            redis_server.process.send_signal(signal.SIGSTOP)
        else:
            redis_server.kill()
        with pytest.warns(UserWarning, match="redis://127.0.0.1:[0-9]*/0 .*left alone"):
            found = ask(llm, prompt(150))
        assert found.outputs[0].token_ids == expected and found.num_cached_tokens == 0
        if trouble == "stalls":
            redis_server.process.send_signal(signal.SIGCONT)
        else:
            redis_server.start()
        time.sleep(0.6)
        ask(llm, prompt(150, 5))
        llm._engine.scheduler.memory.files.cached.wait()
    assert len(objects(redis_server.url)) == 2
    with open_llm(directory, redis_server.url) as late:
        assert [ask(late, prompt(150, seed)).num_cached_tokens for seed in (7, 5)] == [148, 148]


def test_a_store_that_cannot_be_reached_is_refused(directory: Path) -> None:
    for url in ("nothing://bucket", "http://127.0.0.1:9/prefixes"):
        with pytest.raises(ConfigError, match=f"prefix_cache_dir: cannot use {url}"):
            open_llm(directory, url)
