"""When the engine fails, or the server has to end."""

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import Running, eventually, running

from winnow import LLM, SamplingParams

TEXT = "/v1/completions"


class Faulty:
    """An `LLM` whose steps fail while `broken` says so."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self._llm = llm
        self.broken: Any = lambda: False
        engine, step = llm.driver.engine, llm.driver.engine.step

        def faulty_step() -> Sequence[Any]:
            if self.broken():
                raise RuntimeError("a kernel failed at 0x7f00dead")
            return step()

        monkeypatch.setattr(engine, "step", faulty_step)

    @property
    def held(self) -> set[str]:
        return {each.request.request_id for each in self._llm.driver.engine.requests.unfinished}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


@pytest.fixture
def faulty(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    yield Faulty(llm, monkeypatch)
    assert not llm.has_unfinished, "requests were left in the engine"


def test_a_step_that_fails_once_is_tried_again(faulty: Faulty) -> None:
    failures = iter([False, True] + [False] * 10_000)
    with running(faulty) as server:
        body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "seed": 1}
        expected = server.post(TEXT, body).json()["choices"][0]["text"]
        faulty.broken = lambda: next(failures)
        assert server.post(TEXT, body).json()["choices"][0]["text"] == expected
        assert server.client.get("/health").status_code == 200


def test_requests_that_break_the_engine_do_not_end_it(faulty: Faulty) -> None:
    """What fails with its requests, and serves again without them, stays up."""
    with running(faulty) as server:
        faulty.broken = lambda: bool(faulty.held - {"probe"})
        response = server.post(TEXT, {"prompt": "a", "max_tokens": 8})
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["code"] == "request_failed" and "0x7f" not in error["message"]
        assert server.client.get("/health").status_code == 200
        faulty.broken = lambda: False
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 8}).status_code == 200


def test_an_engine_that_fails_ends_the_server(faulty: Faulty) -> None:
    server_ended = threading.Event()
    with running(faulty) as server:
        body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            faulty.broken = lambda: True
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "request_failed"
        assert rest[-1] == "data: [DONE]"
        health = server.client.get("/health")
        assert health.status_code == 503 and health.json()["error"]["code"] == "engine_failed"
        refused = server.post(TEXT, {"prompt": "a"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        server.thread.join(30)
        assert not server.thread.is_alive(), "the server continues without an engine"
        assert server.service.engine.failure is not None
        server_ended.set()
    faulty.broken = lambda: False


def test_a_step_that_does_not_end_turns_health_red(faulty: Faulty) -> None:
    hold = threading.Event()
    with running(faulty, step_timeout=0.2) as server:
        faulty.broken = lambda: hold.wait(30) and False
        thread = threading.Thread(target=lambda: server.post(TEXT, {"prompt": "a", "max_tokens": 1}))
        thread.start()
        eventually(lambda: server.client.get("/health").status_code == 503, "health stays green")
        assert server.client.get("/metrics").status_code == 200  # answers, with the counters of the last step
        hold.set()
        thread.join()
        eventually(lambda: server.client.get("/health").status_code == 200, "health stays red")


def drained(server: Running, body: dict[str, Any]) -> list[str]:
    """Start a stream, tell the server to end, and return the rest of the stream."""
    with server.client.stream("POST", TEXT, json=body) as response:
        lines = response.iter_lines()
        assert next(lines)
        server.server.handle_exit(15, None)
        time.sleep(0.05)
        assert server.service.engine.draining
        return [line for line in lines if line]


def test_requests_in_progress_finish_before_the_end(llm: LLM) -> None:
    with running(llm, shutdown_timeout=30) as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        rest = drained(server, body)
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        server.thread.join(30)
        assert not server.thread.is_alive()
        assert server.service.engine.failure is None


def test_a_server_that_ends_refuses_what_is_new(llm: LLM, tmp_path: Path) -> None:
    """Over new connections and kept ones; what only reads is served, and the answer in progress is finished."""
    with running(llm, shutdown_timeout=30, files_dir=str(tmp_path)) as server:
        body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines)
            server.server.handle_exit(15, None)
            with httpx.Client(base_url=server.address, timeout=20) as client:
                files = {"file": ("in.jsonl", b"{}")}
                refused = [
                    client.get("/ready"),
                    client.post(TEXT, json={"prompt": "a"}),
                    client.post("/v1/responses", json={"input": "a"}),
                    client.post("/tokenize", json={"prompt": "a"}),
                    client.post("/v1/files", files=files, data={"purpose": "batch"}),
                ]
                assert [each.status_code for each in refused] == [503] * 5
                assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
                assert {each.json()["error"]["code"] for each in refused} == {"shutting_down"}
                assert [client.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_who_only_waits_is_refused_at_once_at_the_end(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """What runs is finished; the log says each request in a line."""
    long = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16}
    with (
        running(llm, shutdown_timeout=30, log_requests=True) as server,
        ThreadPoolExecutor(1) as pool,
        server.client.stream("POST", TEXT, json=long) as first,
    ):
        lines = first.iter_lines()
        assert next(lines)
        waits = pool.submit(server.post, TEXT, {"prompt": "a"})
        eventually(lambda: server.service.engine.num_queued()[0] == 1, "it does not wait")
        with caplog.at_level("INFO"):
            server.server.handle_exit(15, None)
            answer = waits.result(5)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "shutting_down"
            assert "length" in [line for line in lines if line][-2]
            eventually(lambda: len(lines_of(caplog)) == 2, "the log says nothing")
    waited, ran = lines_of(caplog)
    assert "503" in waited and re.search(r"200 in [\d.]+ s, 2 \+ 6400 tokens", ran)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server's log says of the requests that ended."""
    return [each.message for each in caplog.records if each.name == "winnow.server" and TEXT in each.message]


def test_the_dashboards_stream_does_not_hold_the_server_up(llm: LLM) -> None:
    with running(llm) as server, server.client.stream("GET", "/stats/stream") as response:
        lines = response.iter_lines()
        assert next(lines)
        server.server.handle_exit(15, None)
        server.thread.join(4)
        assert not server.thread.is_alive()


def test_requests_that_take_too_long_are_told(llm: LLM) -> None:
    with running(llm, shutdown_timeout=0.2) as server:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 4}
        rest = drained(server, body)
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        server.thread.join(30)
        assert not server.thread.is_alive()
    eventually(lambda: not llm.has_unfinished or bool(llm.step()), "a request is left")


def test_nothing_leaks_when_many_come_and_go(llm: LLM) -> None:
    """Streams read slowly, left early, and read whole: afterwards nothing is held."""
    before = llm.stats()
    with running(llm) as server:

        def ask(index: int) -> None:
            body = {"prompt": f"Number {index}", "max_tokens": 40, "ignore_eos": True, "stream": True}
            with server.client.stream("POST", TEXT, json=body) as response:
                for place, _ in enumerate(response.iter_lines()):
                    if index % 3 == 0 and place > index % 7:
                        return
                    if index % 3 == 1 and place % 10 == 0:
                        time.sleep(0.01)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: llm.stats().num_running == 0, "a request is stuck")
        assert server.client.get("/load").json()["server_load"] == 0
        eventually(lambda: llm.stats().kv_bytes_used <= before.kv_bytes_used, "blocks are not given back")
        llm.check_integrity()


def test_outputs_that_another_caller_computed_are_served(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another caller's steps bring all outputs before the server looks for them."""
    submit = llm.driver.submit

    def overtaken(requests: Sequence[Any], box: Any, *more: Any) -> None:
        submit(requests, box, *more)
        while box.unfinished:
            llm.driver.compute()

    monkeypatch.setattr(llm.driver, "submit", overtaken)
    with running(llm) as server:
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True}, timeout=20)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_two_callers_of_one_engine_get_their_own(llm: LLM) -> None:
    """A server takes its own outputs alone, and no other caller takes them."""
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
    with running(llm) as first, running(llm) as second:
        results: list[int] = []
        servers = [first, second] * 4
        threads = [
            threading.Thread(target=lambda server=server: results.append(server.post(TEXT, body).status_code))
            for server in servers
        ]
        for thread in threads:
            thread.start()
        name = llm.submit("b", SamplingParams(max_tokens=20, ignore_eos=True))
        while not any(output.finished and output.request_id == name for output in llm.step()):
            pass
        for thread in threads:
            thread.join()
    assert results == [200] * 8
