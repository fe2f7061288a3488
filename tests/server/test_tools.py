"""Tool calls and reasoning, by transformers' own parser and the model's rules; and the Responses API."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.running import Running, events, running

from winnow import LLM
from winnow.batch.driver import Driver
from winnow.batch.journal import read_checkpoint
from winnow.batch.reader import read_lines
from winnow.batch.records import Tally
from winnow.batch.writer import ResultWriter
from winnow.openai.answers import AnswerReader
from winnow.openai.calls import MAX_CALLS
from winnow.openai.response_templates import TEMPLATES

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\nAnswer:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def without_reasoning(template: dict[str, Any]) -> dict[str, Any]:
    fields = {name: field for name, field in template["fields"].items() if name != "reasoning_content"}
    return {**template, "fields": fields}


@pytest.fixture(scope="module")
def parsing(llm: LLM) -> Iterator[Running]:
    with running(llm, template=TEMPLATE) as server:
        yield server


def forced(llm: LLM, text: str) -> dict[str, Any]:
    """Parameters that make the model say `text`."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return {"forced_tokens": ids, "max_tokens": len(ids), "temperature": 0}


CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


def test_calls_and_reasoning(parsing: Running, llm: LLM) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, **forced(llm, f"<think>sum them</think>{CALL}{CALL}")}
    [choice] = parsing.post(CHAT, body).json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "sum them" and message["content"] is None
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["add", "add"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 3}
    assert len({each["id"] for each in message["tool_calls"]}) == 2

    chunks = events(parsing.post(CHAT, body | {"stream": True}).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "sum them"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert not any("<" in delta.get("content", "") for delta in deltas)


# A model without sense that may reason would do so without end.
NO_REASONING = without_reasoning(TEMPLATE)
LIST_AFTER_ALL = without_reasoning(TEMPLATES["qwen3-coder"] | {"start_anchor_pattern": "\nAnswer:"})
NAMED = {"type": "function", "function": {"name": "add"}}
TWO = [
    {"type": "function", "function": {"name": "add", "parameters": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False,
        "$defs": {"n": {"enum": [3, 4]}}}}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip


@pytest.mark.parametrize("template", [None, NO_REASONING, LIST_AFTER_ALL], ids=["list", "own form", "tags"])
def test_calls_are_demanded(llm: LLM, template: Any) -> None:
    """Whatever the model would say, the answer is calls that fit the functions' schemas, whole and streamed alike."""
    assert llm.tokenizer is not None
    eos = llm.tokenizer.eos_token_id
    with running(llm, template=template) as server:
        for choice, most in (("required", MAX_CALLS), (NAMED, 1)):
            body: dict[str, Any] = {
                "messages": MESSAGES,
                "tools": TWO,
                "tool_choice": choice,
                "max_tokens": 200,
            }
            body |= {"temperature": 1, "seed": 5, "logit_bias": {str(eos): 100}}
            response = server.post(CHAT, body)
            assert response.status_code == 200, response.text
            [whole] = response.json()["choices"]
            assert whole["finish_reason"] == "tool_calls", whole
            calls = [each["function"] for each in whole["message"]["tool_calls"]]
            assert 1 <= len(calls) <= most
            for call in calls:
                allowed = {"add": ({"a": 3}, {"a": 4}), "stop": ({},)}[call["name"]]
                assert json.loads(call["arguments"]) in allowed
                assert choice == "required" or call["name"] == "add"
            chunks = events(server.post(CHAT, body | {"stream": True}).text)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            assert streamed == calls and not any(delta.get("content") for delta in deltas)


def test_calls_of_a_file(llm: LLM, tmp_path: Path) -> None:
    """Lines of `winnow run` and of /v1/batches are answered as requests are."""
    body: dict[str, Any] = {"messages": MESSAGES, "tools": TWO, "tool_choice": "required", "max_tokens": 200}
    body |= {"seed": 5, "parallel_tool_calls": False}
    spoken = {"messages": MESSAGES, "tools": TWO, **forced(llm, f"Well. {CALL}")}
    path, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    path.write_text(
        "".join(
            json.dumps({"custom_id": str(index), "method": "POST", "url": CHAT, "body": each}) + "\n"
            for index, each in enumerate([body, spoken])
        )
    )
    reader = AnswerReader.of(llm.tokenizer, NO_REASONING)
    with ResultWriter(out, {}, read_checkpoint(out, {}, lambda record: None)) as writer:
        driver = Driver(llm, {}, writer, Tally(), model="winnow-demo", seed=0, max_in_flight=2, reader=reader)
        driver.run(read_lines(path), lambda: None)
    with running(llm, template=NO_REASONING) as server:
        answers = [server.post(CHAT, asked).json()["choices"] for asked in (body, spoken)]
    for line, [served] in zip(out.read_text().splitlines(), answers, strict=True):
        [run] = json.loads(line)["response"]["body"]["choices"]
        assert run["finish_reason"] == served["finish_reason"]
        for each in (run, served):
            del each["message"]["tool_calls"][0]["id"]
        assert run["message"] == served["message"]


def test_text_that_breaks_the_rules_is_text(parsing: Running, llm: LLM) -> None:
    text = "<tool_call>{nope"
    body = {"messages": MESSAGES, "tools": TOOLS, **forced(llm, text)}
    for asked in (body, body | {"stream": True}):
        response = parsing.post(CHAT, asked)
        assert response.status_code == 200
    assert parsing.client.get("/health").status_code == 200


def test_tools_reach_the_template(server: Running, llm: LLM) -> None:
    """The demo model's template knows no tools; what it renders is the same, and nothing is refused."""
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "max_tokens": 2}
    assert server.post(CHAT, body).status_code == 200


def test_responses(server: Running) -> None:
    body: dict[str, Any] = {
        "model": "winnow-demo",
        "instructions": "Be short.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "max_output_tokens": 6,
        "temperature": 0,
    }
    whole = server.post("/v1/responses", body).json()
    assert whole["object"] == "response" and whole["status"] in ("completed", "incomplete")
    [item] = whole["output"]
    text = item["content"][0]["text"]
    chat = {
        "messages": [{"role": "system", "content": "Be short."}, *MESSAGES],
        "max_tokens": 6,
        "temperature": 0,
    }
    assert text == server.post(CHAT, chat).json()["choices"][0]["message"]["content"]
    assert whole["usage"]["output_tokens"] <= 6

    stream = server.post("/v1/responses", body | {"stream": True}).text
    found = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] == f"response.{whole['status']}"
    assert "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta") == text
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == text


def test_responses_with_logprobs(parsing: Running, llm: LLM) -> None:
    """A mark that is not whole yet begins no message, and tokens of marks are none of it."""
    extra = forced(llm, "<think>why</think>\n\nHello there. <tool")
    extra["max_output_tokens"] = extra.pop("max_tokens")
    tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    body = {"input": "Hi", "tools": [tool], "top_logprobs": 0, **extra}
    whole = parsing.post("/v1/responses", body).json()
    assert [each["type"] for each in whole["output"]] == ["reasoning", "message"]
    reasoning, message = (each["content"][0] for each in whole["output"])
    assert (reasoning["text"], message["text"]) == ("why", "Hello there. <tool")
    assert "".join(each["token"] for each in message["logprobs"]).strip() == message["text"]


def test_text_without_tools(parsing: Running, llm: LLM) -> None:
    """By the chats' whole and streamed answers and by responses; the stream brings the words as they come."""
    text = f"  Write {CALL}, <think> or </s>?\n"
    body = {"messages": MESSAGES, **forced(llm, text)}
    text = llm.tokenizer.decode(body["forced_tokens"], skip_special_tokens=True)  # type: ignore[union-attr]
    [choice] = parsing.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    chunks = events(parsing.post(CHAT, body | {"stream": True}).text)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text and len([piece for piece in pieces if piece]) > 5
    body = {"input": "Hi", **body, "max_output_tokens": body["max_tokens"]}
    del body["messages"], body["max_tokens"]
    [item] = parsing.post("/v1/responses", body).json()["output"]
    assert item["content"][0]["text"] == text


def test_responses_with_calls(parsing: Running, llm: LLM) -> None:
    tool = {"type": "function", **TOOLS[0]["function"]}  # type: ignore[dict-item]
    extra = forced(llm, f"<think>why</think>ok {CALL}")
    extra["max_output_tokens"] = extra.pop("max_tokens")
    whole = parsing.post("/v1/responses", {"input": "Hi", "tools": [tool], **extra}).json()
    assert [each["type"] for each in whole["output"]] == ["reasoning", "message", "function_call"]
    history = [{"role": "user", "content": "Hi"}, *whole["output"]]
    history.append({"type": "function_call_output", "call_id": whole["output"][2]["call_id"], "output": "4"})
    assert parsing.post("/v1/responses", {"input": history, "max_output_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"input": None},
        {"input": 5},
        {"input": []},
        {"input": [{"type": "computer_call"}]},
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"instructions": 5},
        {"tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "xml"}}},
        {"n": 2},
        {"bogus": 1},
        {"max_output_tokens": 0},
        {"prompt_logprobs": 1},
    ],
)
def test_responses_refuse(server: Running, change: dict[str, Any]) -> None:
    response = server.post("/v1/responses", {"input": "Hi"} | change)
    assert response.status_code == 400 and response.json()["error"]["message"]
