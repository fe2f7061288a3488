"""Conversations over HTTP: named, listed, kept within bytes, and forgotten."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running, eventually, running

from winnow import LLM

CHAT, RESPONSES, MESSAGES, SESSIONS = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/sessions"
KEYS = {"one": "key-of-one", "two": "key-of-two"}
ONE, TWO = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
LONG = "Tell me a story about a dog and a cat who went to the sea, and what they saw there. " * 3


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[Running]:
    with running(llm, KEYS, response_memory="1MiB") as server:
        yield server


def listed(server: Running, headers: dict[str, str] = ONE) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in server.client.get(SESSIONS, headers=headers).json()["data"]}


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"session_id": "named"}, {}),
        ({}, {"x-session-id": "named"}),
        ({"prompt_cache_key": "named", "prompt_cache_retention": "24h"}, {}),
    ],
)
def test_a_chat_is_a_session(keyed: Running, fields: dict[str, Any], headers: dict[str, str]) -> None:
    messages = [{"role": "user", "content": LONG + str(fields) + str(headers)}]
    body = {"temperature": 0, "max_tokens": 6, **fields}
    first = keyed.post(CHAT, body | {"messages": messages}, headers=ONE | headers).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    second = keyed.post(CHAT, body | {"messages": messages}, headers=ONE | headers).json()
    known = first["usage"]["total_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= known - 2
    found = listed(keyed)["named"]
    assert (found["tier"], found["num_turns"]) == ("device", 2) and found["num_bytes"] > 0
    # Another tenant sees and deletes nothing.
    assert "named" not in listed(keyed, TWO)
    assert keyed.client.delete(f"{SESSIONS}/named", headers=TWO).status_code == 404
    assert keyed.client.delete(f"{SESSIONS}/named", headers=ONE).json()["deleted"]
    assert "named" not in listed(keyed)
    # The last turn of a session ends it.
    released = keyed.service.llm.stats().sessions_released
    for release in (False, True):
        keyed.post(CHAT, body | fields | {"messages": messages, "release": release}, headers=ONE | headers)
        assert ("named" in listed(keyed)) == (not release)
    assert keyed.service.llm.stats().sessions_released == released + 1


def test_responses_and_marks_are_sessions(keyed: Running) -> None:
    first = keyed.post(RESPONSES, {"input": "Hi there", "max_output_tokens": 4}, headers=ONE).json()
    body = {"input": "And then?", "previous_response_id": first["id"], "max_output_tokens": 4}
    keyed.post(RESPONSES, body, headers=ONE)
    assert listed(keyed)[first["id"]]["num_turns"] == 2
    marked = {"type": "text", "text": "Hi there", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages: list[Any] = [{"role": "user", "content": [marked]}]
    body = {"model": "winnow-demo", "max_tokens": 4, "messages": messages}
    answer = keyed.post(MESSAGES, body, headers=ONE).json()
    del marked["cache_control"]
    again = {"type": "text", "text": "Go on", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [again]}]
    keyed.post(MESSAGES, body, headers=ONE)
    [found] = [each for name, each in listed(keyed).items() if name.startswith("cache-")]
    assert found["num_turns"] == 2


def test_a_conversation_of_responses(keyed: Running) -> None:
    """What was said in it comes first."""
    body = {"conversation": "trip", "max_output_tokens": 4, "temperature": 0}
    first = keyed.post(RESPONSES, body | {"input": LONG}, headers=ONE).json()
    assert first["conversation"] == {"id": "trip"}
    second = keyed.post(
        RESPONSES, body | {"conversation": {"id": "trip"}, "input": "Why?"}, headers=ONE
    ).json()
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 2
    other = keyed.post(RESPONSES, body | {"input": "Why?"}, headers=TWO).json()
    assert other["usage"]["input_tokens"] < first["usage"]["input_tokens"]
    for bad in ({"conversation": 5}, {"conversation": "trip", "previous_response_id": first["id"]}):
        assert keyed.post(RESPONSES, body | {"input": "Hi"} | bad, headers=ONE).status_code == 400


def test_a_session_ages_while_it_waits(keyed: Running) -> None:
    """Nothing is asked for: its oldest turns are compressed all the same, and answers say what is kept."""
    memory, messages, turns = 150 * 6288, list[dict[str, str]](), []
    for question in (LONG, "And then?", LONG, "Why?"):
        messages.append({"role": "user", "content": question})
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": 6,
            "session_id": "old",
            "session_memory": memory,
        }
        turns.append(keyed.post(CHAT, body, headers=ONE).json())
        messages.append({"role": "assistant", "content": turns[-1]["choices"][0]["message"]["content"]})
        eventually(lambda: listed(keyed)["old"]["num_bytes"] <= memory, "it is too large")
    assert listed(keyed)["old"]["compressed"]
    kv = turns[-1]["usage"]["kv"]
    assert kv["kept"] < kv["total"] and "kv" not in turns[0]["usage"]
    assert turns[-1]["choices"][0]["eviction"]["policy"] == "session"
    text = keyed.client.get("/metrics", headers=ONE).text
    assert 'winnow_sessions{model_name="winnow-demo",tier="device"}' in text
    [line] = [each for each in text.splitlines() if each.startswith("winnow_session_compressions_total{")]
    assert float(line.split()[-1]) >= 1
    # What cannot be so small is said to be the prefix cache's.
    body |= {"session_id": "large", "session_memory": 1000}
    kv = [keyed.post(CHAT, body, headers=ONE).json()["usage"].get("kv", {}) for _ in range(2)]
    assert kv[1]["session"] == "outgrown" and listed(keyed)["large"]["outgrown"]
    assert (
        'winnow_sessions_outgrown_total{model_name="winnow-demo"} 1'
        in keyed.client.get("/metrics", headers=ONE).text
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"session_id": ""},
        {"session_id": 5},
        {"session_id": "x" * 257},
        {"release": "x", "session_id": "x"},
        {"session_memory": "much", "session_id": "x"},
        {"session_memory": 1000},
        {"release": True},
        {"prompt_cache_key": 5},
    ],
)
def test_bad_sessions_are_refused(keyed: Running, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    refused = keyed.post(CHAT, body, headers=ONE)
    assert refused.status_code == 400, refused.text
    assert next(iter(fields)) in refused.text


def test_conversations_that_went_to_disk_are_listed_there(tmp_path: Path) -> None:
    """A small memory holds one of two conversations; the other is on disk, and comes back from there."""
    with LLM(kv_memory="600KiB", max_model_len=92, prefix_cache_dir=tmp_path) as llm, running(llm) as server:
        said = {}
        for name in ("first", "second"):
            body = {"prompt": name + LONG, "max_tokens": 4, "session_id": name, "return_token_ids": True}
            [answer] = server.post("/v1/completions", body).json()["choices"]
            said[name] = answer["prompt_token_ids"] + answer["token_ids"]
        eventually(lambda: listed(server, {})["first"]["tier"] == "disk", "it is not on disk")
        assert listed(server, {})["second"]["tier"] == "device"
        body = {"prompt": [*said["first"], 5], "session_id": "first", "max_tokens": 4}
        usage = server.post("/v1/completions", body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(said["first"]) - 1
        text = server.client.get("/metrics").text
        values = dict(re.findall(r"^winnow_(disk_\w+|sessions)\{.*\} (\S+)$", text, re.MULTILINE))
        assert float(values["disk_loaded_tokens_total"]) > 40 and float(values["disk_bytes_used"]) > 1000
        assert float(values["disk_writing"]) == 1
