"""What must not get in: each case is refused with OpenAI's envelope, and the server continues."""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.server.running import MODEL, Running, eventually, running

from winnow import LLM

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]
OTHER = {"type": "function", "function": {"name": "other"}}
JSON = {"type": "json_object"}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def nested(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


TOOL = tool({"type": "object"})
DEEP = tool({"type": "object", "properties": {"a": nested(300)}})
BAD_PATTERN = tool({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}


def refused(response: httpx.Response, status: int, message: str = "") -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"], error
    assert " at 0x" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (TEXT, {}, "needs prompt"),
        (TEXT, {"prompt": None}, "needs prompt"),
        (TEXT, {"prompt": ""}, "must not be empty"),
        (TEXT, {"prompt": []}, "must not be empty"),
        (TEXT, {"prompt": ["a", ""]}, "must not be empty"),
        (TEXT, {"prompt": [1, "a"]}, "token ids"),
        (TEXT, {"prompt": [-1]}, "token ids"),
        (TEXT, {"prompt": [10**9]}, "token ids must be between"),
        (TEXT, {"prompt": [True]}, "token ids"),
        (TEXT, {"prompt": 5}, "must be text"),
        (TEXT, {"prompt": ["a"] * 2000}, "at most 1024"),
        (TEXT, {"prompt": ["a"] * 20, "n": 128}, "at most 1024"),
        (TEXT, {"prompt": "a", "n": 0}, "n must be"),
        (TEXT, {"prompt": "a", "n": 10**6}, "n must be"),
        (TEXT, {"prompt": "a", "n": "2"}, "n must be"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 1e999 and "x"}, "max_tokens"),
        (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "a", "logprobs": 10**6}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 100}, "stop"),
        (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
        (TEXT, {"prompt": "a", "stop": ["x" * 5000]}, "stop"),
        (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"1": 1000}}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": list(range(5000))}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "seed": 10**30}, "seed"),
        (TEXT, {"prompt": "a", "reasoning": ["<think>", "</think>"]}, "reasoning"),
        (TEXT, {"prompt": "a", "until": "x"}, "until"),
        (TEXT, {"prompt": "a", "response_format": {"type": "json_object", "schemma": {}}}, "'schemma'"),
        (TEXT, {"prompt": "a", "response_format": {"type": "json_object", "schema": 5}}, "schema must be an object"),
        (TEXT, {"prompt": "a", "response_format": {"type": "text", "schema": {}}}, "'schema'"),
        (TEXT, {"prompt": "a", "response_format": {**JSON, "json_schema": {}}}, "has no field"),
        (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"prompt": "a", "stream": True, "stream_options": {"bogus": 1}}, "stream_options"),
        (TEXT, {"prompt": "a", "model": 5}, "model"),
        (TEXT, {"prompt": "a", "cache_salt": "victim"}, "cache_salt"),
        (TEXT, {"prompt": "a", "prompt_embeds": "abc"}, "prompt_embeds"),
        (TEXT, {"prompt": "a", "no_such_field": 1}, "no_such_field"),
        (TEXT, {"prompt": "a", "service_tier": True}, "service_tier must be a text"),
        (TEXT, {"prompt": "a", "store": "no"}, "store must be true or false"),
        (TEXT, {"prompt": "a", "metadata": {"a": 1}}, "metadata must be an object of texts"),
        (RESPONSES, {"input": "a", "store": "no"}, "store must be true or false"),
        (TEXT, {"prompt": "a", "structured_outputs": {"json": "{" * 50000}}, "json"),
        (TEXT, {"prompt": list(range(5, 5000))}, "context"),
        (TEXT, {"prompt": "word " * 400000}, "context"),
        (CHAT, {}, "needs messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "content"),
        (CHAT, {"messages": [{"content": "a"}]}, "role"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "images cannot be read: "),
        (CHAT, {"messages": MESSAGES * 5000}, "messages"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 7*7 }}"}, "chat_template"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "{{ 7*7 }}"}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": MESSAGES, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"messages": MESSAGES, "tools": [{}] * 1000}, "tools"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tools are none"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "always"}, "tool_choice must be"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function"}}, "none of tools"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": OTHER}, "names 'other'"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": TOOL, "response_format": JSON}, "no other form"),
        (CHAT, {"messages": MESSAGES, "tools": [DEEP], "tool_choice": "required"}, "levels deep"),
        (CHAT, {"messages": MESSAGES, "tools": [BAD_PATTERN], "tool_choice": "required"}, "cannot be compiled"),
        (CHAT, {"messages": MESSAGES, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (CHAT, {"messages": MESSAGES, "echo": True}, "echo"),
        (CHAT, {"messages": MESSAGES, "priority": 1.5}, "priority"),
    ],
)  # fmt: skip
def test_bodies(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        asked = {"stream": True, **body} if stream and "stream_options" not in body else body
        refused(server.post(path, asked), 400, message)
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unreadable JSON"),
        (b"{nope", "unreadable JSON"),
        (b"[1]", "must be an object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "not UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "unreadable JSON"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "unreadable JSON"),
        (b'{"prompt":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "unreadable JSON"),
    ],
)
def test_broken_json(server: Running, data: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    refused(server.client.post(TEXT, content=data, headers=headers), 400, message)


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "((a{1,500}){1,500}){1,500}b"},
        {"regex": "(a|b|ab)*c" * 200},
        {"grammar": "start: a a a a\na: b | b b | b b b\nb: a | /x?/"},
        {"json": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}},
    ],
)
@pytest.mark.timeout(60)
def test_bombs(server: Running, form: Any) -> None:
    """Answered or refused, as a form of answers and as a tool's parameters; others are served meanwhile."""
    calls = {"tools": [tool(form["json"])], "tool_choice": "required"} if "json" in form else {}
    bodies = [(TEXT, {"prompt": "a", "max_tokens": 8, "structured_outputs": form})]
    bodies += [(CHAT, {"messages": MESSAGES, "max_tokens": 8, **calls})] * bool(calls)
    with ThreadPoolExecutor(2) as pool:
        bombs = [pool.submit(server.post, path, body) for path, body in bodies]
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert {each.result().status_code for each in bombs} <= {200, 400, 500}
    assert server.client.get("/health").status_code == 200
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_http_faults(server: Running) -> None:
    refused(server.client.get("/nothing/here"), 404)
    wrong_method = server.client.get(TEXT)
    refused(wrong_method, 405)
    assert wrong_method.headers["allow"] == "POST"
    for path, methods in (
        ("/v1/files/0", "DELETE, GET, HEAD"),
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/batches", "GET, HEAD, POST"),
    ):
        assert server.client.options(path).headers["allow"] == methods
    answered = server.post(TEXT, {"prompt": "a", "model": "gpt-9", "max_tokens": 1}).json()
    assert answered["model"] == MODEL  # which it was, whatever the client calls it
    assert refused(server.client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    refused(server.client.post(TEXT, content=b"prompt=a", headers={"content-type": "text/plain"}), 415)


def test_request_ids_come_back(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post(TEXT, body, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 500):
        found = server.post(TEXT, body, headers={"x-request-id": bad}).headers["x-request-id"]
        assert found.startswith("req_")
    assert server.post(TEXT, {}, headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    # Two requests under one id are two requests.
    assert server.post(TEXT, body, headers={"x-request-id": "abc-1"}).status_code == 200


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Running]:
    """A server with two tenants and small limits."""
    keys = {"alice": "key-of-alice", "bob": "key-of-bob"}
    with running(llm, keys, max_body=4096, max_num_queued_reqs=0, max_reqs_per_tenant=8) as server:
        yield server


def as_tenant(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def test_keys(guarded: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    wrong = ["", "Bearer", "Bearer wrong", "Basic key-of-alice", "Bearer key-of-alic", "Bearer key-of-alicee"]
    for header in wrong:
        response = guarded.post(TEXT, body, headers={"authorization": header})
        refused(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.post(TEXT, body, headers=as_tenant("alice")).status_code == 200
    for path in ("/v1/models", "/metrics", "/version", "/load", "/openapi.json", "/stats/stream", "/no/such"):
        refused(guarded.client.get(path), 401)
    for path in ("/tokenize", "/detokenize"):
        refused(guarded.post(path, {}), 401)
    for path in ("/health", "/ping", "/ready", "/", "/chat"):
        assert guarded.client.get(path).status_code == 200


def test_bodies_are_bounded(guarded: Running) -> None:
    headers = as_tenant("alice") | {"content-type": "application/json"}
    refused(guarded.client.post(TEXT, content=b"x" * 5000, headers=headers), 413)
    chunks = (b"x" * 1000 for _ in range(50))  # no length is said beforehand
    refused(guarded.client.post(TEXT, content=chunks, headers=headers), 413)


def test_a_full_server_says_so_before_the_stream(guarded: Running, llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 8}
    with (
        guarded.client.stream("POST", TEXT, json=body, headers=as_tenant("alice")) as first,
        guarded.client.stream("POST", TEXT, json=body, headers=as_tenant("bob")) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        lines = first.iter_lines(), second.iter_lines()  # kept: a lost iterator closes the connection
        assert all(next(each) for each in lines)
        response = guarded.post(TEXT, {"prompt": "a", "stream": True, "n": 1}, headers=as_tenant("alice"))
        assert refused(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
    refused(guarded.post(TEXT, {"prompt": "a", "n": 9}, headers=as_tenant("alice")), 400)


def test_a_full_queue(llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 16}
    with running(llm, max_num_queued_reqs=2) as server:
        with server.client.stream("POST", TEXT, json=body) as first:
            lines = first.iter_lines()  # kept: a lost iterator closes the connection
            assert next(lines)
            response = server.post(TEXT, {"prompt": "a", "n": 3, "stream": True})
            assert refused(response, 503, "queue is full")["code"] == "server_overloaded"
            assert int(response.headers["retry-after"]) >= 1
        refused(server.post(TEXT, {"prompt": "a", "n": 19}), 400)


def test_a_crowd_does_not_slip_through_while_it_is_tokenised(llm: LLM) -> None:
    """Of many that come at once only as many are let in as the queue has room for."""
    body = {"prompt": "word " * 600, "max_tokens": 100, "ignore_eos": True}
    with running(llm, max_num_queued_reqs=0) as server, ThreadPoolExecutor(40) as pool:
        codes = [each.status_code for each in pool.map(lambda _: server.post(TEXT, body), range(40))]
    assert set(codes) == {200, 503} and codes.count(200) >= 16
    assert codes.count(503) >= 1


def test_a_queue_is_of_answers_that_hold_no_kvs(llm: LLM) -> None:
    """Of twenty at once, in memory for three and a queue of four, the others are refused, and counted."""
    body = {"prompt": "word " * 400, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    length = len(llm.tokenize(body["prompt"]).token_ids) + 60
    options = {"kv_memory": 3 * llm.kv_bytes(length), "max_num_seqs": 16, "enable_prefix_caching": False}
    with LLM(**options) as small, running(small, max_num_queued_reqs=4, max_ttft=600) as server:
        with ThreadPoolExecutor(20) as pool:
            found = list(pool.map(lambda _: server.post(TEXT, body), range(20)))
        codes = Counter(each.status_code for each in found)
        assert set(codes) == {200, 503} and 7 <= codes[200] <= 12, codes
        assert all(int(each.headers["retry-after"]) >= 1 for each in found if each.status_code == 503)
        assert len({each.json()["choices"][0]["text"] for each in found if each.status_code == 200}) == 1
        assert small.driver.engine.scheduler.running.mean_answer == 60  # of those that were answered
        shown = server.client.get("/metrics").text
        line = re.search(r'winnow_requests_refused_total\{.*reason="queue"\} (\d+)', shown)
        assert line is not None and int(line[1]) == codes[503]


def test_who_would_wait_too_long_is_refused(llm: LLM) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 16}
    with running(llm, max_ttft=0.2) as server:
        short = {"prompt": "a", "max_tokens": 2}
        with server.client.stream("POST", TEXT, json=body) as first:
            lines = first.iter_lines()  # kept: a lost iterator closes the connection
            for _ in range(2000):
                next(lines)
            error = server.post(TEXT, short)
            assert refused(error, 503, "first token is expected after")["code"] == "server_overloaded"
            assert int(error.headers["retry-after"]) >= 1
        eventually(lambda: server.post(TEXT, short).status_code == 200, "no request is served again")


def test_loopback_is_the_default() -> None:
    from winnow.server.config import ServerConfig

    assert ServerConfig().host == "127.0.0.1"


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, by a comparison that takes as long for each."""
    import hmac

    from winnow.server import access as keys

    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(second)
        return real(first, second)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    found = keys.Keys({"a": "1", "b": "2", "c": "3"})
    assert found.tenant("Bearer 1") == "a"
    assert len(compared) == 3
