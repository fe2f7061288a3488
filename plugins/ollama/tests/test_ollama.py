"""Ollama's API by Ollama's own client: five endpoints, whole and as lines of JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import MODEL, Running, running
from tests.server.test_messages import says
from tests.server.test_tools import CALL, TEMPLATE, TOOLS

from winnow import LLM

ollama = pytest.importorskip("ollama")

CHAT = "/v1/chat/completions"
ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
SHORT = {"temperature": 0, "num_predict": 6, "num_ctx": 64, "seed": 1, "repeat_last_n": 64}
KEY = "key-of-one"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="32MiB", max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Running]:
    with running(llm, {"one": KEY}, TEMPLATE) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def client(keyed: Running) -> Any:
    return ollama.Client(keyed.address, headers={"Authorization": f"Bearer {KEY}"})


def test_a_chat_is_that_of_openai(client: Any, keyed: Running) -> None:
    chat = {"messages": ASKED, "temperature": 0, "max_tokens": 6}
    theirs = keyed.post(CHAT, chat).json()
    expected = theirs["choices"][0]["message"]["content"]
    whole = client.chat(MODEL, ASKED, options=SHORT)
    assert (whole.model, whole.message.role, whole.message.content) == (MODEL, "assistant", expected)
    lines = list(client.chat(MODEL, ASKED, options=SHORT, stream=True))
    assert len(lines) > 1 and "".join(each.message.content for each in lines) == expected
    assert [each.done for each in lines] == [False] * (len(lines) - 1) + [True]
    for last in (whole, lines[-1]):
        counts = (last.prompt_eval_count, last.eval_count, last.done_reason)
        assert counts == (theirs["usage"]["prompt_tokens"], 6, "length")
        assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 0
    sent = keyed.post("/api/chat", {"model": MODEL, "messages": ASKED, "options": SHORT})
    assert sent.headers["content-type"] == "application/x-ndjson"
    records = list(map(json.loads, sent.text.splitlines()))  # a line may bring several tokens
    assert "".join(each["message"]["content"] for each in records) == expected and records[-1]["done"]
    # What the answer begins with is continued, and no limit is none.
    begun = [*ASKED, {"role": "assistant", "content": "They went"}]
    theirs = keyed.post(CHAT, chat | {"messages": begun, "continue_final_message": True}).json()
    assert (
        client.chat(MODEL, begun, options=SHORT).message.content == theirs["choices"][0]["message"]["content"]
    )


def test_a_prompt_with_the_template_or_raw(client: Any, keyed: Running) -> None:
    expected = client.chat(MODEL, ASKED, options=SHORT).message.content
    assert client.generate(MODEL, "Hi", system="Be short.", options=SHORT).response == expected
    lines = list(client.generate(MODEL, "Once upon", raw=True, options=SHORT, stream=True))
    theirs = keyed.post("/v1/completions", {"prompt": "Once upon", "temperature": 0, "max_tokens": 6}).json()
    assert "".join(each.response for each in lines) == theirs["choices"][0]["text"] != expected
    assert lines[-1].done_reason == "length"
    loaded = client.generate(MODEL, "")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")


def test_a_form(llm: LLM) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 3}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    options = {**SHORT, "num_predict": 40}
    with running(llm) as server:
        client = ollama.Client(server.address)
        said = client.generate(MODEL, "Hi", options=options, format=schema).response
        assert "".join(said.split()).startswith('{"a":3')  # and white space after it
        assert client.generate(MODEL, "Hi", options=options, format="json").response.lstrip().startswith("{")


def test_calls_and_thoughts(client: Any, keyed: Running, llm: LLM) -> None:
    forced = says(llm, f"<think>sum them</think>ok {CALL}{CALL}")
    options = {"num_predict": forced["max_tokens"], "forced_tokens": forced["forced_tokens"]}
    whole = client.chat(MODEL, ASKED, tools=TOOLS, think=True, options=options)
    assert (whole.message.thinking, whole.message.content.strip()) == ("sum them", "ok")
    calls = [(each.function.name, each.function.arguments) for each in whole.message.tool_calls]
    assert calls == [("add", {"a": 3})] * 2
    lines = list(client.chat(MODEL, ASKED, tools=TOOLS, options=options, stream=True))
    assert "".join(each.message.thinking or "" for each in lines) == "sum them"
    assert sum(len(each.message.tool_calls or ()) for each in lines) == 2
    # Earlier calls and their results are those of a chat.
    function = {"name": "add", "arguments": {"a": 3}}
    turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    last = client.chat(MODEL, [*turns, {"role": "tool", "tool_name": "add", "content": "3"}], options=SHORT)
    turns[-1] |= {
        "tool_calls": [{"id": "1", "type": "function", "function": function | {"arguments": '{"a": 3}'}}]
    }
    body = {"messages": [*turns, {"role": "tool", "tool_call_id": "1", "content": "3"}], "temperature": 0}
    theirs = keyed.post(CHAT, body | {"max_tokens": 6}).json()
    assert last.prompt_eval_count == theirs["usage"]["prompt_tokens"]
    assert last.message.content == theirs["choices"][0]["message"]["content"]


def test_what_is_here(client: Any, keyed: Running, llm: LLM) -> None:
    listed = client.list().models
    assert [each.model for each in listed] == [MODEL, "other-name"] and listed[0].size == llm.weight_bytes
    shown = client.show(MODEL)
    assert shown.modelinfo["winnow.context_length"] == llm.max_model_len
    assert "completion" in shown.capabilities and shown.template
    assert keyed.client.get("/api/version").json()["version"].count(".") == 2
    with pytest.raises(ollama.ResponseError) as raised:
        client.show("no-such-model")
    assert raised.value.status_code == 404 and "no-such-model" in raised.value.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat = 2 is not served"),
        ({"options": {"num_ctx": 10**9}}, "options.num_ctx must be between 1 and"),
        ({"options": {"num_predict": 0}}, "options.num_predict must be"),
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": 3}, "options must be an object"),
        ({"think": "much"}, "think must be true, false, low"),
        ({"format": "yaml"}, "format must be json or a schema"),
        (
            {"messages": [{"role": "user", "content": "x", "images": [3]}]},
            r"messages[0].images must be a list",
        ),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "have no vision tower"),
        ({"suffix": "x"}, "suffix is not served for /api/chat"),
        ({"strange": 1}, "'strange' is not a field of /api/chat"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str, keyed: Running) -> None:
    sent = keyed.post("/api/chat", {"model": MODEL, "messages": ASKED, **change})
    assert sent.status_code == 400 and list(sent.json()) == ["error"] and words in sent.json()["error"]
    assert keyed.client.get("/api/tags", headers={"authorization": "Bearer x"}).status_code == 401
