"""Anthropic's Messages API, as the documentation says and by Anthropic's own client."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running, running
from tests.server.test_stored_responses import VERBATIM
from tests.server.test_tools import CALL, TEMPLATE

from winnow import LLM
from winnow.anthropic.request import chat_body
from winnow.openai.errors import ApiError

PATH, CHAT = "/v1/messages", "/v1/chat/completions"
KEY = "key-of-one"
TOOL = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"enum": [3]}}, "additionalProperties": False},
    "cache_control": {"type": "ephemeral"},
}
ASKED: dict[str, Any] = {
    "model": "winnow-demo",
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Running]:
    with running(llm, {"one": KEY}, TEMPLATE) as server:
        server.client.headers["x-api-key"] = KEY
        yield server


@pytest.fixture(scope="module")
def client(keyed: Running) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=keyed.address, api_key=KEY, max_retries=0) as client:
        yield client


def says(llm: LLM, text: str) -> dict[str, Any]:
    """Fields that make the model say `text`."""
    ids = llm.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
    return {"max_tokens": len(ids), "forced_tokens": ids}


def streamed(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each under the name that its data has."""
    found = []
    for part in text.rstrip().split("\n\n"):
        name, _, data = part.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message(keyed: Running) -> None:
    """The answer is a chat's."""
    body = ASKED | {"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]}
    message = keyed.post(PATH, body).json()
    system = {"role": "system", "content": "Be short."}
    chat = {"messages": [system, *ASKED["messages"]], "temperature": 0, "max_tokens": 6}
    whole = keyed.post(CHAT, chat).json()
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "winnow-demo")
    assert message["content"] == [{"type": "text", "text": whole["choices"][0]["message"]["content"]}]
    assert message["stop_reason"] == "max_tokens" and message["stop_sequence"] is None
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 6
    counted = {name: value for name, value in body.items() if name in ("model", "system", "messages")}
    assert keyed.post(f"{PATH}/count_tokens", counted).json() == {
        "input_tokens": whole["usage"]["prompt_tokens"]
    }


def test_a_marked_text_with_a_question_behind_it_is_a_document() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text, question = {"type": "text", "text": "Ann lives in Vienna."}, {"type": "text", "text": "Where?"}
    for blocks, marked in (
        ([text | mark, question], True),
        ([text, question | mark], False),
        ([text], False),
    ):
        [message] = chat_body(
            {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}]}
        )["messages"]
        assert (message["content"][0].get("winnow") == {"context": True}) is marked


ADA = "Ada lives in Oslo. She has two dogs and a bird, and she walks along the river every morning. "
BO = "Bo lives in Rome. He sells old books and maps, and he plays the piano in the evening with his sister. "


def document(text: str, **fields: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, **fields}


def test_documents_stand_in_any_order(keyed: Running, client: Any, llm: LLM) -> None:
    """They are texts to the model, each behind its title and context, and reuse finds them at any place."""
    content = {"type": "content", "content": [{"type": "text", "text": BO}]}
    hit = {"type": "search_result", "source": "https://x", "title": "Hit", "content": content["content"]}
    blocks = [
        document(ADA, title="Of Ada", context="1999", citations={"enabled": False}),
        {"type": "document", "source": content, "title": None, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Where?"},
    ]
    [message] = chat_body(ASKED | {"messages": [{"role": "user", "content": blocks}]})["messages"]
    texts = [part["text"] for part in message["content"]]
    assert texts == ["Of Ada", "1999", ADA, BO, "Where?"]
    marks = [part.get("winnow") for part in message["content"]]
    assert marks == [None, None, {"document": True}, {"document": True, "context": True}, None]
    found = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [document(ADA), hit], "is_error": True}
    ]
    [result, _] = chat_body(ASKED | {"messages": [{"role": "user", "content": [*found, blocks[2]]}]})[
        "messages"
    ]
    assert [part["text"] for part in result["content"]] == [f"Error: {ADA}", "Hit", "https://x", BO]

    def ask(head: str, *texts: str) -> Any:
        shown = [{"type": "text", "text": head}, *map(document, texts), blocks[2]]
        asked: Any = {
            "model": "winnow-demo",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": shown}],
        }
        return client.messages.create(**asked, extra_body={"temperature": 0, "reuse": "documents"})

    first, second = ask("Read this.", ADA, BO), ask("And now, please, read these two.", BO, ADA)
    assert not hasattr(first.usage, "reused_input_tokens")
    tokens = sum(len(llm.tokenizer.encode(text)) for text in (ADA, BO))  # type: ignore[union-attr]
    assert tokens - second.usage.reused_input_tokens < 3 * llm.config.cache.block_size


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": ""}}, "text/plain, got 'base64'"),
        ({"source": {"type": "url", "url": "https://x"}}, "text/plain, got 'url'"),
        ({"source": {"type": "file", "file_id": "a"}}, "text/plain, got 'file'"),
        ({"source": {"type": "text", "media_type": "text/html", "data": "a"}}, "got 'text/html'"),
        ({"source": {"type": "text", "media_type": "text/plain", "data": [ADA]}}, "source.data must be text"),
        ({"source": {"type": "content", "content": [{"type": "image"}]}}, r"content\[0\] must be a text block"),
        ({"source": None}, "text/plain, got None"),
        ({"title": 5}, "title must be text"),
        ({"citations": {"enabled": True}}, "citations are not written"),
        ({"citations": 5}, "citations must be an object"),
    ],
)  # fmt: skip
def test_documents_that_are_not_read(change: dict[str, Any], named: str) -> None:
    blocks = [document("Ada.") | change, {"type": "text", "text": "Where?"}]
    with pytest.raises(ApiError, match=named):
        chat_body(ASKED | {"messages": [{"role": "user", "content": blocks}]})


def test_stop_sequences_and_prefill(keyed: Running) -> None:
    text = keyed.post(PATH, ASKED).json()["content"][0]["text"]
    stop = text[len(text) // 2 :]
    message = keyed.post(PATH, ASKED | {"stop_sequences": [stop]}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"] == [{"type": "text", "text": text[: text.index(stop)]}]
    open_turn = [*ASKED["messages"], {"role": "assistant", "content": "They went"}]
    message = keyed.post(PATH, ASKED | {"messages": open_turn}).json()
    chat = {"messages": open_turn, "temperature": 0, "max_tokens": 6, "continue_final_message": True}
    assert message["content"][0]["text"] == keyed.post(CHAT, chat).json()["choices"][0]["message"]["content"]


def test_blocks_whole_and_streamed(keyed: Running, llm: LLM) -> None:
    body = ASKED | {"tools": [TOOL]} | says(llm, f"<think>sum them</think>ok {CALL}{CALL}")
    message = keyed.post(PATH, body).json()
    thinking, text, *calls = message["content"]
    assert thinking == {"type": "thinking", "thinking": "sum them", "signature": ""}
    assert text["text"].strip() == "ok" and message["stop_reason"] in ("tool_use", "max_tokens")
    assert [(each["type"], each["name"], each["input"]) for each in calls] == [
        ("tool_use", "add", {"a": 3})
    ] * 2

    events = streamed(keyed.post(PATH, body | {"stream": True}).text)
    assert [each["type"] for each in events[:2]] == ["message_start", "ping"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert [each["type"] for each in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == message["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"]
    blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert [each["type"] for each in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    for index, block in enumerate(blocks):
        own = [each for each in events if each.get("index") == index]
        assert own[0]["type"] == "content_block_start" and own[-1]["type"] == "content_block_stop"
        pieces = "".join(
            value for each in own[1:-1] for name, value in each["delta"].items() if name != "type"
        )
        whole = message["content"][index]
        assert (json.loads(pieces) if block["type"] == "tool_use" else pieces) == (
            whole.get("input") or whole.get("text") or whole.get("thinking")
        )


def test_the_client_of_anthropic(client: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    message = client.messages.create(**ASKED_BY_CLIENT)
    with client.messages.stream(**ASKED_BY_CLIENT) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == message.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)
    prompt = {"model": "winnow-demo", "messages": ASKED["messages"]}
    usage = message.usage
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    for kind, change in (
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"system": 5}),
    ):
        with pytest.raises(kind) as raised:
            client.messages.create(**ASKED_BY_CLIENT | change)
        assert raised.value.body["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert raised.value.request_id == raised.value.body["request_id"]
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**ASKED_BY_CLIENT)


# The client takes a field that it does not know in extra_body.
ASKED_BY_CLIENT = {
    **{name: ASKED[name] for name in ("model", "max_tokens", "messages")},
    "extra_body": {"temperature": 0},
}


def test_tools_by_the_client(client: Any) -> None:
    """A call that is demanded, and the turn behind it."""
    asked = {"model": "winnow-demo", "max_tokens": 200, "tools": [TOOL]}
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    first = client.messages.create(
        messages=ASKED["messages"], tool_choice=choice, extra_body={"seed": 5}, **asked
    )
    assert first.stop_reason == "tool_use"
    [call] = [each for each in first.content if each.type == "tool_use"]
    assert call.name == "add" and call.input in ({}, {"a": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4"}]}
    turns = [*ASKED["messages"], {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})
    second = client.messages.create(messages=turns, **asked | {"max_tokens": 2})
    assert second.usage.output_tokens <= 2


def test_a_turn_computes_its_own_tokens(keyed: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", VERBATIM)
    turns: list[Any] = [{"role": "user", "content": "A dog and a bird walked along the river at night. " * 8}]
    first = keyed.post(
        PATH, ASKED | {"messages": turns} | says(llm, " It was cold, and they went home.")
    ).json()
    assert first["usage"]["cache_read_input_tokens"] < 16  # others began alike
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And then?"}]
    second = keyed.post(PATH, ASKED | {"messages": turns}).json()["usage"]
    known = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert known - second["cache_read_input_tokens"] <= llm.config.cache.block_size
    assert second["input_tokens"] < 3 * llm.config.cache.block_size


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "narrator", "content": "Hi"}]},
        {"messages": [*ASKED["messages"], {"role": "system", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"model": None},
        {"system": 5},
        {"stop_sequences": "a"},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [TOOL], "tool_choice": {"type": "other"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "none"}},
        {"thinking": {"type": "much"}},
        {"output_config": 5},
        {"metadata": {"user_id": 5}},
        {"n": 2},
        {"bogus": 1},
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(keyed: Running, change: dict[str, Any]) -> None:
    response = keyed.post(PATH, ASKED | change)
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]


def test_errors_before_the_route(keyed: Running) -> None:
    refused = keyed.post(PATH, ASKED, headers={"x-api-key": "wrong"})
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert keyed.client.get(PATH).json()["error"]["type"] == "invalid_request_error"
    assert keyed.post(f"{PATH}/batches", {}).json()["error"]["type"] == "not_found_error"
