"""Completions and chats over HTTP, held against the offline engine."""

import json
import math
from typing import Any

import pytest
from tests.server.running import MODEL, Running, events, eventually, running

from winnow import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "What is the name of the dog?"}]


def test_answers_equal_the_offline_engines(server: Running, llm: LLM) -> None:
    params: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 7,
        "top_p": 0.9,
        "min_p": 0,
        "n": 2,
    }
    [chat] = llm.chat(MESSAGES, SamplingParams(**params, logprobs=2))
    body = {"model": MODEL, "messages": MESSAGES, **params, "logprobs": True, "top_logprobs": 2}
    served = server.post("/v1/chat/completions", body).json()
    assert [c["message"]["content"] for c in served["choices"]] == [o.text for o in chat.outputs]
    for choice, answer in zip(served["choices"], chat.outputs, strict=True):
        assert answer.logprobs is not None
        expected = [
            found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert got == pytest.approx(expected, abs=1e-4)
        assert choice["finish_reason"] == answer.finish_reason
    assert served["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)

    prompts = ["Once upon a time", "The king of"]
    offline = llm.generate(prompts, SamplingParams(**params, repetition_penalty=1.2, logit_bias={300: 3.0}))
    body = {"prompt": prompts, **params, "repetition_penalty": 1.2, "logit_bias": {"300": 3.0}}
    served = server.post("/v1/completions", body).json()
    assert [c["text"] for c in served["choices"]] == [o.text for out in offline for o in out.outputs]
    assert [c["index"] for c in served["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("chat", [True, False])
def test_streams_add_up_to_whole_answers(server: Running, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"seed": 3, "n": 2, "max_tokens": 30, "stop": [" the"], "min_tokens": 6}
    body |= {"messages": MESSAGES, "logprobs": True} if chat else {"prompt": ["One", "Two"], "logprobs": 1}
    whole = server.post(path, body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = server.post(path, body | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[-1]["choices"] == []
    for usage in (chunks[-1]["usage"], whole["usage"]):
        del usage["prompt_tokens_details"]  # the second finds more in the prefix cache
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        reasons = [c["finish_reason"] for c in own if c["finish_reason"] is not None]
        assert reasons == [choice["finish_reason"]]
        if chat:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in own)
            assert text == choice["message"]["content"]
            entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
        else:
            assert "".join(c["text"] for c in own) == choice["text"]
            for name in ("tokens", "token_logprobs", "top_logprobs"):
                found = [each for c in own if c["logprobs"] for each in c["logprobs"][name]]
                assert found == choice["logprobs"][name]


def test_echo_with_logprobs(server: Running, llm: LLM) -> None:
    """What lm_eval's local-completions asks, with token ids and with text."""
    [output] = llm.generate(
        ["The king of the land"], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    )
    ids = output.prompt_token_ids
    body = {"prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    [choice] = server.post("/v1/completions", body).json()["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1 and logprobs["token_logprobs"][0] is None
    assert output.prompt_logprobs is not None
    expected = [
        found[t].logprob for t, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if found
    ]
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert choice["text"].endswith(output.outputs[0].text)
    alone = server.post("/v1/completions", body | {"max_tokens": 0}).json()
    assert len(alone["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert alone["usage"]["completion_tokens"] == 0
    body = {"prompt": "The king", "max_tokens": 3, "echo": True, "temperature": 0}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert whole.startswith("The king")
    chunks = events(server.post("/v1/completions", body | {"stream": True}).text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


@pytest.mark.parametrize("prompt", ["The king</s> of<s> the land", "Köln 😀 is a city", " The king"])
def test_offsets_point_at_tokens(server: Running, llm: LLM, prompt: str) -> None:
    """Also where the tokenizer puts `<s>` in front, and where the prompt holds it."""
    assert llm.tokenizer is not None
    said, more = (
        llm.tokenizer.encode(text, add_special_tokens=False) for text in (" wood", " by the 😀 sea")
    )
    answer = [*said, llm.tokenizer.eos_token_id, *more]  # its text leaves special tokens out
    body = {"prompt": prompt, "forced_tokens": answer, "max_tokens": len(answer), "logprobs": 1, "echo": True}
    body["ignore_eos"] = True
    [choice] = server.post("/v1/completions", body).json()["choices"]
    shown = choice["logprobs"]
    pairs = list(zip(shown["tokens"], shown["text_offset"], strict=True))
    assert pairs[0] == ("<s>", 0) and pairs[1][1] == 0 and "</s>" in shown["tokens"][-len(answer) :]
    end = len(prompt)
    for token, offset in pairs[1:]:
        hidden = token in ("<s>", "</s>") and offset >= end
        assert hidden or token.startswith("bytes:") or choice["text"].startswith(token, offset), (
            token,
            offset,
        )
    chunks = events(server.post("/v1/completions", body | {"stream": True}).text)
    streamed = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [offset for each in streamed for offset in each] == shown["text_offset"]


@pytest.mark.parametrize("most", [0, 2])
def test_no_more_alternatives_than_asked(server: Running, most: int) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 2, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": most}
    server.post(
        "/v1/chat/completions", body
    )  # both find its prompt in the cache, so that numbers round alike
    content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    chunks = events(server.post("/v1/chat/completions", body | {"stream": True}).text)
    found = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for each in found for entry in each] == content
    for entry in content:
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(top) == most and top == sorted(top, reverse=True)
        assert all(
            value >= entry["logprob"] or entry["token"] in {e["token"] for e in entry["top_logprobs"]}
            for value in top
        )
    if most:  # some token was none of them
        assert any(e["token"] not in {each["token"] for each in e["top_logprobs"]} for e in content)


def test_prompt_logprobs(server: Running, llm: LLM) -> None:
    params = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    [output] = llm.generate(["The king of the land"], SamplingParams(**params))
    [chat] = llm.chat(MESSAGES, SamplingParams(**params))
    answer = server.post("/v1/completions", {"prompt": ["The king of the land"] * 2, "n": 2, **params}).json()
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    body = {"messages": MESSAGES, **params}
    whole = server.post("/v1/chat/completions", body).json()
    assert "prompt_logprobs" not in whole["choices"][0] and len(shown) == 4
    for got, own in [*((each, output) for each in shown), (whole["prompt_logprobs"], chat)]:
        assert own.prompt_logprobs is not None and got[0] is None
        for entry, candidates in zip(got[1:], own.prompt_logprobs[1:], strict=True):
            assert candidates is not None and list(entry) == [str(token) for token in candidates]
            for token, found in candidates.items():
                assert entry[str(token)]["logprob"] == pytest.approx(found.logprob, abs=1e-4)
                assert entry[str(token)]["decoded_token"] == found.decoded_token
                assert entry[str(token)]["rank"] == found.rank
    echoed = server.post(
        "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1}
    ).json()
    assert "prompt_logprobs" not in echoed["choices"][0]


def test_extensions(server: Running) -> None:
    prompt = list(range(100, 500))
    body = {"prompt": prompt, "max_tokens": 4, "eviction": "snapkv", "kv_budget": 100, "context_tokens": 390}
    plain = server.post("/v1/completions", body).json()["choices"][0]
    assert "kept" not in plain["eviction"]
    body |= {"return_kept": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    rows = [kvs for layer in choice["eviction"]["kept"] for kvs in layer]
    assert sum(rows) / len(rows) == plain["eviction"]["mean_kept"]
    assert choice["eviction"]["policy"] == "snapkv" and choice["eviction"]["mean_kept"] < 160
    stream = events(server.post("/v1/completions", body | {"stream": True}).text)
    assert stream[-1]["choices"][0]["eviction"]["kept"] == choice["eviction"]["kept"]
    body = {
        "prompt": prompt,
        "max_tokens": 4,
        "eviction": "snapkv",
        "compression": 4,
        "return_token_ids": True,
    }
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert len(choice["token_ids"]) == 4 and choice["prompt_token_ids"] == prompt
    assert server.post("/v1/completions", body | {"eviction": "no such"}).status_code == 400


def test_structured_output(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
    ]
    for form in forms:
        body = {"messages": MESSAGES, "max_tokens": 100, "seed": 1, "temperature": 1, "min_p": 0, **form}
        text = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert json.loads(text)["a"] in ("x", "y")
    body = {"prompt": "It is", "structured_outputs": {"choice": ["red", "blue"]}}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] in ("red", "blue")
    refused = server.post("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "["}})
    assert refused.status_code == 400 and "compiled" in refused.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_blocks(server: Running, llm: LLM) -> None:
    before = llm.stats().kv_bytes_used
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 4}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: without it the connection closes
        assert len([next(lines) for _ in range(10)]) == 10 and llm.stats().num_running > 0
    eventually(lambda: llm.stats().num_running == 0, "the request continues without its client")
    eventually(lambda: llm.stats().kv_bytes_used <= before + 2**20, "its blocks are not given back")
    llm.check_integrity()
    # Also one that waits for the whole answer.
    with pytest.raises(Exception, match="timed out"):
        server.post("/v1/completions", body | {"stream": False}, timeout=0.5)
    eventually(lambda: llm.stats().num_running == 0, "the request continues without its client")
    eventually(lambda: server.client.get("/load").json()["server_load"] == 0, "a request is still counted")


def test_priority_is_lower_first(server: Running, llm: LLM) -> None:
    assert server.post("/v1/completions", {"prompt": "a", "priority": -5}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "a", "priority": "high"}).status_code == 400


def test_logprobs_are_numbers(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 3, "logit_bias": {"5": -100}}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])


def test_tokenize_and_back(server: Running, llm: LLM) -> None:
    found = server.post("/tokenize", {"prompt": "The king", "return_token_strs": True}).json()
    assert llm.tokenizer is not None
    assert found["tokens"] == llm.tokenizer.encode("The king") and found["count"] == len(found["token_strs"])
    bare = server.post("/tokenize", {"prompt": "The king", "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": bare}).json()["prompt"].strip() == "The king"
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["tokens"] == llm.tokenize_chat(MESSAGES).token_ids
    for path, body in (
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
        ("/tokenize", {}),
    ):
        assert server.post(path, body).status_code == 400


def test_cached_tokens_are_told(server: Running) -> None:
    body = {"prompt": list(range(700, 900)), "max_tokens": 1}
    first, second = (server.post("/v1/completions", body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"]["cached_tokens"] >= 150
    assert second["prompt_tokens"] == 200


def test_prefixes_are_a_tenants_own(llm: LLM) -> None:
    """One tenant's prompt is found again by itself alone: neither its count nor its time tells another."""
    with running(llm, {"alice": "key-a", "bob": "key-b"}) as server:

        def cached(key: str) -> int:
            body = {"prompt": list(range(1200, 1400)), "max_tokens": 1}
            response = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
            found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [cached("key-a"), cached("key-b")] == [0, 0]
        assert cached("key-a") >= 150 and cached("key-b") >= 150


def test_metrics_count(server: Running) -> None:
    def value(name: str, text: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    before = server.client.get("/metrics").text
    server.post("/v1/completions", {"prompt": [3, 2, 1], "max_tokens": 5, "ignore_eos": True})
    after = server.client.get("/metrics").text
    for name, change in {
        "winnow_generation_tokens_total": 5,
        "vllm:generation_tokens_total": 5,
        "winnow_prompt_tokens_total": 3,
        "winnow_request_success_total": 1,
        "winnow_time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "winnow_request_generation_tokens_sum": 5,
    }.items():
        assert value(name, after) - value(name, before) == change, name
