"""Responses that are kept, and conversations that continue them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running, running

from winnow import LLM
from winnow.openai.errors import ApiError
from winnow.server.stored_responses import StoredResponses

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
KEYS = {"one": "key-of-one", "two": "key-of-two"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS.values())


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Running]:
    with running(llm, KEYS, response_memory="1MiB") as server:
        yield server


def says(llm: LLM, text: str, **fields: Any) -> dict[str, Any]:
    """A body whose answer is `text`."""
    ids = llm.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]
    return {"forced_tokens": ids, "max_output_tokens": len(ids), "temperature": 0, **fields}


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


# As most models' templates: an answer stands there as it was written. The demo model's puts a space before it.
VERBATIM = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Question: ' + message['content'] + '\nAnswer:' }}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"
)


def test_a_conversation_goes_on(keyed: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn is the answer to the whole conversation, of which it computes its own tokens alone."""
    monkeypatch.setattr(llm.tokenizer, "chat_template", VERBATIM)
    question = "Tell me a story about a dog and a cat who went to the sea. " * 8
    first = keyed.post(
        PATH,
        says(llm, " They went by train and by boat, and then they went home again on foot.", input=question),
        headers=ONE,
    ).json()
    assert first["store"] and first["previous_response_id"] is None
    asked = {
        "input": "And then?",
        "previous_response_id": first["id"],
        "temperature": 0,
        "max_output_tokens": 5,
    }
    second = keyed.post(PATH, asked, headers=ONE).json()
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And then?"},
    ]
    whole = keyed.post(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 5}, headers=TWO).json()
    shared = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert shared < llm.config.cache.block_size, "no more than how all chats begin"
    assert text_of(second) == whole["choices"][0]["message"]["content"]
    assert second["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    assert second["previous_response_id"] == first["id"]
    known = first["usage"]["total_tokens"]
    cached, block = second["usage"]["input_tokens_details"]["cached_tokens"], llm.config.cache.block_size
    assert known - cached <= block

    # Streamed, from the middle too: the conversation forks.
    for before, turns in ((second, 5), (first, 3)):
        body = asked | {"previous_response_id": before["id"], "stream": True}
        stream = keyed.post(PATH, body, headers=ONE).text
        last = json.loads(stream.rstrip().rpartition("data: ")[2])["response"]
        assert keyed.client.get(f"{PATH}/{last['id']}", headers=ONE).json() == last
        items = keyed.client.get(f"{PATH}/{last['id']}/input_items?order=asc", headers=ONE).json()["data"]
        assert len(items) == turns
        assert [each["content"][0]["text"] for each in items[:3]] == [question, text_of(first), "And then?"]


def test_what_is_kept(keyed: Running, llm: LLM) -> None:
    response = keyed.post(PATH, says(llm, "Yes.", input="Hi"), headers=ONE).json()
    url = f"{PATH}/{response['id']}"
    assert keyed.client.get(url, headers=ONE).json() == response
    [item] = keyed.client.get(f"{url}/input_items", headers=ONE).json()["data"]
    assert item["type"] == "message" and item["content"] == [{"type": "input_text", "text": "Hi"}]
    assert keyed.client.get(f"{url}/input_items?order=up", headers=ONE).status_code == 400
    # No other tenant's, and gone when it is deleted.
    body = {"input": "And?", "previous_response_id": response["id"], "max_output_tokens": 2}
    after = keyed.post(PATH, body, headers=ONE).json()
    for headers in (TWO, ONE):
        assert keyed.client.delete(url, headers=headers).status_code == (404 if headers is TWO else 200)
        assert keyed.client.get(url, headers=TWO).status_code == 404
        refused = keyed.post(PATH, body, headers=TWO)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert keyed.client.get(url, headers=ONE).status_code == 404
    assert keyed.post(PATH, body, headers=ONE).status_code == 400
    # What continues it stays whole.
    assert len(keyed.client.get(f"{PATH}/{after['id']}/input_items", headers=ONE).json()["data"]) == 3
    alone = keyed.post(PATH, says(llm, "Yes.", input="Hi", store=False), headers=ONE).json()
    assert not alone["store"]
    assert keyed.client.get(f"{PATH}/{alone['id']}", headers=ONE).status_code == 404
    assert keyed.post(PATH, {"input": "Hi", "store": 5}, headers=ONE).status_code == 400


def test_calls_go_on(keyed: Running, llm: LLM) -> None:
    """The output of a call is a turn of its own."""
    tool = {"type": "function", "name": "add", "parameters": NOTHING}
    fields = {"tools": [tool], "seed": 5, "max_output_tokens": 200}
    first = keyed.post(
        PATH, {"input": "Hi", "tool_choice": {"type": "function", "name": "add"}, **fields}, headers=ONE
    ).json()
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    body = {"input": [output], "previous_response_id": first["id"], **fields, "max_output_tokens": 2}
    second = keyed.post(PATH, body, headers=ONE)
    assert second.status_code == 200, second.text
    items = keyed.client.get(f"{PATH}/{second.json()['id']}/input_items", headers=ONE).json()["data"]
    assert [each["type"] for each in items] == ["function_call_output", "function_call", "message"]


def test_the_client_of_openai(llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    with running(llm) as server, openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        first = client.responses.create(model=model, input="Hi", max_output_tokens=4)
        second = client.responses.create(
            model=model, input="And?", previous_response_id=first.id, max_output_tokens=4
        )
        assert client.responses.retrieve(second.id).output_text == second.output_text
        items = list(client.responses.input_items.list(second.id, limit=2))
        assert [each.role for each in items] == ["user", "assistant", "user"]
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)


def test_bytes_are_bounded() -> None:
    kept = StoredResponses(10_000)

    def add(name: str, before: str | None = None, size: int = 1000) -> None:
        item = {"type": "message", "content": "a" * size}
        kept.add({"id": name, "output": []}, [item], kept.before(before))

    add("a")
    add("b", "a")
    size = kept.num_bytes
    kept.delete("a")
    assert kept.num_bytes == size, "b holds it"
    assert len(kept.get("b").conversation()) == 2
    kept.delete("b")
    assert kept.num_bytes == 0
    for index in range(20):
        add(str(index))
        kept.get("0")
    assert 0 < kept.num_bytes <= 10_000 and 2 < len(kept) < 10
    kept.get("0"), kept.get("19")
    with pytest.raises(ApiError, match="no longer kept"):
        kept.get("1")
    # One that was let go counts as long as its continuation is computed.
    turn, size = kept.get("19"), kept.num_bytes
    kept.delete("19")
    assert kept.num_bytes == size
    kept.add({"id": "late", "output": []}, [], turn)
    del turn
    assert kept.num_bytes > size
    add("huge", size=20_000)
    assert kept.num_bytes == 0 and len(kept) == 0
