"""What agents send: requests as Claude Code and Codex write them, and what such clients have met elsewhere."""

import asyncio
import gzip
import http.client
import json
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running, events, running
from tests.server.test_messages import streamed
from tests.server.test_tools import CALL, MESSAGES, TEMPLATE, TOOLS, forced

from winnow import LLM, SamplingParams
from winnow.anthropic.context import CLEARED, edited
from winnow.anthropic.request import chat_body
from winnow.errors import CapacityError
from winnow.openai.answers import AnswerReader
from winnow.openai.tools import CallRule
from winnow.prompt.messages import normalise_messages
from winnow.sampling import TextStream
from winnow.sampling.params import ReasoningMarks
from winnow.server import http as server_http
from winnow.server.http import EventStream

CHAT, MESSAGE, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MODEL = "claude-opus-4-8"
"""A name that the server does not know: it serves one model, whatever a client calls it."""

# Bodies of Claude Code 2.1, their texts and the list of tools shortened.
READ = {
    "name": "Read",
    "description": "Reads a file from the local filesystem.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"description": "The absolute path to the file to read", "type": "string"},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
}
CACHED = {"type": "ephemeral", "ttl": "1h"}
REMINDER = "<system-reminder>\nAs you answer, mind the code style of the project.\n</system-reminder>"
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32000,
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.173.b2c; cc_entrypoint=cli; cch=eb6c6;",
        },
        {
            "type": "text",
            "text": "You are Claude Code, Anthropic's official CLI for Claude.",
            "cache_control": CACHED,
        },
        {
            "type": "text",
            "text": "You are an interactive agent that helps users with tasks.",
            "cache_control": CACHED,
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": REMINDER},
                {"type": "text", "text": "Who rows?", "cache_control": CACHED},
            ],
        },
        {"role": "system", "content": "The following skills are available: none."},
    ],
    "tools": [READ],
    "metadata": {"user_id": '{"device_id":"0a1b","account_uuid":"","session_id":"6f7c"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
TURN = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I read the file.", "signature": "c2ln"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "Ann rows."}],
                "is_error": False,
                "cache_control": CACHED,
            }
        ],
    },
]


@pytest.fixture(scope="module")
def reading(llm: LLM) -> Iterator[Running]:
    with running(llm, template=TEMPLATE) as server:
        yield server


def prompt_of(server: Running, name: str = "input_tokens", **body: Any) -> int:
    counted = {
        key: body[key]
        for key in ("model", "system", "messages", "tools", "context_management")
        if key in body
    }
    return int(server.post(f"{MESSAGE}/count_tokens", counted).json()[name])


def test_claude_code(reading: Running, llm: LLM) -> None:
    """A session: the check before it starts, a title, two turns, the tokens of the second."""
    assert reading.client.head("/").status_code == 200
    title = {
        "model": MODEL,
        "max_tokens": 32000,
        "temperature": 1,
        "system": CLAUDE_CODE["system"][:1],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who rows?"}]}],
        "output_format": {"type": "json_schema", "schema": {"enum": ["Rowers"]}},
        "tools": [],
        "metadata": CLAUDE_CODE["metadata"],
    }
    assert reading.post(f"{MESSAGE}?beta=true", title).json()["content"][0]["text"] == '"Rowers"'
    said = forced(llm, "<think>I read</think>Let me see." + CALL.replace("add", "Read"))
    first = CLAUDE_CODE | said
    found = streamed(reading.post(f"{MESSAGE}?beta=true", first).text)
    assert (
        found[-2]["delta"]["stop_reason"] == "tool_use"
        or found[-2]["usage"]["output_tokens"] == said["max_tokens"]
    )
    assert found[-2]["context_management"] == {"applied_edits": []}
    system = [
        {**CLAUDE_CODE["system"][0], "text": "x-anthropic-billing-header: cch=00000;"},
        *CLAUDE_CODE["system"][1:],
    ]
    second = CLAUDE_CODE | {"system": system, "messages": [*CLAUDE_CODE["messages"], *TURN], "max_tokens": 4}
    usage = streamed(reading.post(f"{MESSAGE}?beta=true", second).text)[-2]["usage"]
    counted = prompt_of(reading, **second)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    # Another checksum of the billing line changes nothing before the turn that is new.
    assert (
        usage["cache_read_input_tokens"] > prompt_of(reading, **CLAUDE_CODE) - 2 * llm.config.cache.block_size
    )


def test_a_system_message_within_a_conversation(
    reading: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in its place, also where the template takes one at the beginning alone."""
    first_alone = (
        "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('first') }}"
        "{% endif %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    )
    monkeypatch.setattr(llm.tokenizer, "chat_template", first_alone)
    user, system_text = {"role": "user", "content": "Who rows?"}, {"role": "system", "content": "Ann rows."}

    def chat(*messages: dict[str, Any]) -> int:
        return int(reading.post("/tokenize", {"messages": list(messages)}).json()["count"])

    for system in ({}, {"system": "Be brief."}):
        prompt = [{"role": "system", "content": "Be brief."}] if system else []
        marked = "<system-reminder>\nAnn rows.\n</system-reminder>"
        found = prompt_of(reading, model="m", messages=[user, system_text], **system)
        assert found == chat(*prompt, {"role": "user", "content": f"Who rows?\n{marked}"})
        joined = [*(each["content"] for each in prompt), "Ann rows."]
        found = prompt_of(reading, model="m", messages=[system_text, user], **system)
        assert found == chat({"role": "system", "content": "\n".join(joined)}, user)


def test_edits_of_a_conversation(reading: Running) -> None:
    turns = [CLAUDE_CODE["messages"][0], *TURN, *TURN, {"role": "user", "content": "And now?"}]
    body = {"model": MODEL, "messages": turns, "tools": [READ]}
    edit: dict[str, Any] = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 1}}
    keep = {"keep": {"type": "tool_uses", "value": 1}}

    def ask(*edits: dict[str, Any], **more: Any) -> Any:
        managed = {"context_management": {"edits": list(edits)}, "max_tokens": 1, **more}
        return reading.post(MESSAGE, body | managed).json()

    managed = body | {"context_management": {"edits": [edit | keep]}}
    counted = reading.post(f"{MESSAGE}/count_tokens", managed).json()
    assert counted["context_management"]["original_input_tokens"] == prompt_of(reading, **body)
    second = json.loads(json.dumps(TURN).replace("toolu_1", "toolu_2"))
    messages = chat_body(body | {"messages": [*turns[:3], *second, *turns[-1:]]}, counted=True)["messages"]
    shown, _ = edited(edit | keep | {"clear_tool_inputs": True}, normalise_messages(messages))
    assert [each["content"] for each in shown if each["role"] == "tool"] == [CLEARED, "Ann rows."]
    calls = [each["tool_calls"][0]["function"]["arguments"] for each in shown if "tool_calls" in each]
    assert calls == ["{}", '{"file_path": "/a"}']
    [report] = ask(edit | keep)["context_management"]["applied_edits"]
    assert report["type"] == edit["type"] and report["cleared_tool_uses"] == 1
    for unchanged in (edit, edit | keep | {"exclude_tools": ["Read"]}, edit | keep | {"trigger": None}):
        assert ask(unchanged)["context_management"]["applied_edits"] == []
    thinking = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    [report] = ask(thinking)["context_management"]["applied_edits"]
    assert report["cleared_thinking_turns"] == 1
    # What stands behind a gap keeps its KVs, where a request says so.
    roles = "user", "assistant", "user", "assistant", "user"
    history = [
        {"role": role, "content": f"{number} rows to the sea and sees a dog. " * 20}
        for number, role in enumerate(roles)
    ]
    ask(messages=history)
    for reuse, found in (("anywhere", True), ("exact", False)):
        usage = ask(messages=history[:1] + history[3:], reuse=reuse)["usage"]
        assert (usage.get("reused_input_tokens", 0) > 128) == found
    compact = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 10}}
    for refused in (compact, {"type": "other"}, edit | {"kep": 1}, edit | {"trigger": {"value": "x"}}):
        assert (
            "context_management" in ask(refused)["error"]["message"]
            or "compact" in ask(refused)["error"]["message"]
        )
    for name, value in (
        ("mcp_servers", [{"url": "x"}]),
        ("speed", "fast"),
        ("container", "c"),
        ("contxt", 1),
    ):
        assert name in ask(**{name: value})["error"]["message"]
    assert "usage" in ask(mcp_servers=[], speed="standard", container=None, fallbacks=[])


# A body of Codex, its texts and the list of tools shortened.
CODEX: dict[str, Any] = {
    "model": "gpt-5.2-codex",
    "instructions": "You are Codex, based on GPT-5.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Sandbox: none."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who rows?"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__notes", "tools": [{"type": "function", "name": "list_notes"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-0b7c",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0a"},
}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_codex(reading: Running, llm: LLM) -> None:
    """Two turns, the second of which repeats what the first has answered, in the form of its own items."""
    text = "<think>I look</think>Let me see." + called("exec_command", cmd="ls") + called("list_notes")
    found = responded(reading, CODEX | as_response(forced(llm, text)))
    assert [tool["type"] for tool in found["tools"]] == ["function", "custom", "namespace"]
    reasoning, message, call = found["output"]
    assert reasoning["encrypted_content"] and reasoning["content"][0]["text"] == "I look"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "ls"},
    )
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for name, kind, more in (
        ("apply_patch", "custom_tool_call", {"input": "*** Begin"}),
        ("list_notes", "function_call", {"namespace": "mcp__notes"}),
    ):
        asked = CODEX | as_response(forced(llm, called(name, input="*** Begin")))
        [item] = [each for each in responded(reading, asked)["output"] if each["type"] != "message"]
        assert item["type"] == kind and item["name"] == name and more.items() <= item.items()

    sealed = {name: reasoning[name] for name in ("type", "id", "summary", "encrypted_content")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Ann rows."}
    turn = [sealed, message, call, result]
    used = responded(reading, CODEX | {"input": [*CODEX["input"], *turn], "max_output_tokens": 2})["usage"]
    function = {"name": "exec_command", "arguments": '{"cmd": "ls"}'}
    answer = {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "I look",
        "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
    }
    tool = {"role": "tool", "tool_call_id": call["call_id"], "content": "Ann rows."}
    shown = [
        {"role": "system", "content": CODEX["instructions"]},
        {"role": "developer", "content": "Sandbox: none."},
        {"role": "user", "content": "Who rows?"},
    ]
    assert (
        used["input_tokens"]
        == reading.post("/tokenize", {"messages": [*shown, answer, tool]}).json()["count"]
    )


def as_response(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_output_tokens" if name == "max_tokens" else name: value for name, value in fields.items()}


def responded(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(RESPONSES, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = streamed(response.text)[-1]["response"]
    return found


def test_items_that_are_referred_to(reading: Running) -> None:
    first = reading.post(RESPONSES, {"input": "Hi", "max_output_tokens": 2}).json()
    [message] = first["output"]
    asked = {"max_output_tokens": 1, "store": False}
    whole = reading.post(
        RESPONSES, {**asked, "input": ["", message, {"role": "user", "content": "So?"}][1:]}
    ).json()
    for reference in ({"type": "item_reference", "id": message["id"]}, {"id": message["id"]}):
        body = {**asked, "input": [reference, {"role": "user", "content": "So?"}]}
        found = reading.post(RESPONSES, body).json()
        assert found["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    missing = reading.post(RESPONSES, {**asked, "input": [{"type": "item_reference", "id": "msg_0"}]})
    assert missing.status_code == 404 and "msg_0" in missing.text
    logprobs = reading.post(
        RESPONSES, {**asked, "input": "Hi", "include": ["message.output_text.logprobs"]}
    ).json()
    assert logprobs["output"][0]["content"][0]["logprobs"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"include": ["web_search_call.results"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"formatt": {}}}, "formatt"),
        ({"reasoning": {"efort": "low"}}, "efort"),
        ({"stream_options": {"usage": True}}, "usage"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0]"),
        ({"text": {"verbosity": 5}}, "text.verbosity must be one of low, medium, high, got 5"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary must be one of auto, concise, detailed"),
        ({"stream_options": {"include_obfuscation": "no"}}, "stream_options.include_obfuscation"),
        ({"max_tool_calls": 0}, "max_tool_calls must be an integer of at least 1, got 0"),
        ({"max_tool_calls": "x"}, "max_tool_calls"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "winnow-reasoning-1.x"}]},
            "encrypted_content",
        ),
    ],
)
def test_what_responses_do_not_do_is_named(reading: Running, change: dict[str, Any], named: str) -> None:
    response = reading.post(RESPONSES, {"input": "Hi"} | change)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"verbosity": "loud"}, "verbosity must be one of low, medium, high, got 'loud'"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "function.strict"),
        (MESSAGE, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}}, "parallel_tool_use must be"),
        (MESSAGE, {"tool_choice": {"type": "auto", "parallel": False}}, "tool_choice has no field 'parallel'"),
        (MESSAGE, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "is_error": "no"}]}]}, "content[0].is_error must be true"),
    ],
)  # fmt: skip
def test_values_that_would_do_nothing_are_named(
    reading: Running, path: str, change: dict[str, Any], named: str
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, **change}
    response = reading.post(path, body)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_what_says_nothing_is_taken(reading: Running) -> None:
    for change in (
        {"verbosity": "low"},
        {"chat_template_kwargs": {"enable_thinking": None}},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": None}}]},
    ):
        assert reading.post(CHAT, {"messages": MESSAGES, "max_tokens": 1, **change}).status_code == 200
    quiet = {"input": "Hi", "max_output_tokens": 1, "text": {"verbosity": "low"}, "max_tool_calls": 3}
    assert reading.post(RESPONSES, quiet | {"reasoning": {"summary": "auto"}}).status_code == 200


@pytest.mark.parametrize(
    ("said", "wrong", "shown"),
    [
        ("no such file", True, "Error: no such file"),
        ("Error: none", True, "Error: none"),
        ("<tool_use_error>none</tool_use_error>", True, "<tool_use_error>none</tool_use_error>"),
        ("no such file", False, "no such file"),
        ("no such file", None, "no such file"),
    ],
)
def test_results_that_are_errors_say_so(said: str, wrong: bool | None, shown: str) -> None:
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": said, "is_error": wrong}
    turns = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = chat_body({"model": MODEL, "max_tokens": 1, "messages": turns})
    assert normalise_messages(body["messages"])[-1] == {"role": "tool", "tool_call_id": "a", "content": shown}


def test_calls_of_an_earlier_form() -> None:
    """`function_call` and the role `function` are a call and its result, which templates know."""
    call = {"name": "add", "arguments": '{"a": 3}'}
    given = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "add", "content": "4"},
        {"role": "assistant", "content": "4", "function_call": None},
    ]
    first, second, third = normalise_messages(given)
    assert first == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "add", "type": "function", "function": call}],
    }
    assert second == {"role": "tool", "name": "add", "tool_call_id": "add", "content": "4"}
    assert third == {"role": "assistant", "content": "4"}


def test_one_call_where_one_is_allowed(reading: Running, llm: LLM) -> None:
    said = forced(llm, f"Well. {CALL}{CALL}")
    own = forced(llm, f"Well. {CALL}")
    more = {**own, "max_tokens": own["max_tokens"] + 40, "ignore_eos": True}
    chat = {"messages": MESSAGES, "tools": TOOLS, **said}
    assert len(reading.post(CHAT, chat).json()["choices"][0]["message"]["tool_calls"]) == 2
    one = chat | {"parallel_tool_calls": False}
    [choice] = reading.post(CHAT, one).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["message"]["content"] == "Well."
    chunks = events(reading.post(CHAT, one | {"stream": True}).text)
    assert sum(len(each["choices"][0]["delta"].get("tool_calls", ())) for each in chunks) == 1
    tool = {"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}  # type: ignore[index]
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    message = {"model": MODEL, "messages": MESSAGES, "tools": [tool], "tool_choice": auto, **said}
    kinds = [block["type"] for block in reading.post(MESSAGE, message).json()["content"]]
    assert kinds == ["text", "tool_use"]
    flat = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    asked = {"input": "Hi", "tools": flat, "parallel_tool_calls": False, **as_response(said)}
    assert [each["type"] for each in reading.post(RESPONSES, asked).json()["output"]] == [
        "message",
        "function_call",
    ]
    # The answer ends with the call, and what was generated is what is counted: nothing ends it before the first token
    # that is not forced.
    answered = {**one, **more}
    whole = reading.post(CHAT, answered).json()
    *_, end, counted = events(
        reading.post(CHAT, answered | {"stream": True, "stream_options": {"include_usage": True}}).text
    )
    assert whole["choices"][0]["finish_reason"] == end["choices"][0]["finish_reason"] == "tool_calls"
    as_message = reading.post(MESSAGE, message | more).json()
    as_answer = reading.post(RESPONSES, asked | as_response(more)).json()
    assert as_message["stop_reason"] == "tool_use" and as_answer["status"] == "completed"
    assert {
        whole["usage"]["completion_tokens"],
        counted["usage"]["completion_tokens"],
        as_message["usage"]["output_tokens"],
        as_answer["usage"]["output_tokens"],
    } == {own["max_tokens"] + 1}


def test_text_that_is_complete(llm: LLM) -> None:
    """With the token that ends a call, where no token must follow."""
    assert llm.tokenizer is not None
    reader, rule = AnswerReader.of(llm.tokenizer, TEMPLATE), CallRule([TOOLS[0]["function"]], False, False)  # type: ignore[list-item]
    text = TextStream(llm.tokenizer, reader.bind(SamplingParams(), "Answer:", TOOLS, rule))
    ids = llm.tokenizer.encode(f"<think>Well.</think> So: {CALL}", add_special_tokens=False)
    found = []
    for token in ids:
        text.push(token)
        found.append(text.is_complete)
    assert found == [False] * (len(ids) - 1) + [True]


@pytest.mark.parametrize(
    ("stop", "left"),
    [
        ("two", "One "),
        ("\n\n", "One two"),
        ("three", "One two\n\n"),
        ("zero", "One two\n\nthree"),
        ("<think>", None),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_stop_strings_behind_reasoning(llm: LLM, stop: str, left: str | None, begun: bool) -> None:
    """Within reasoning and in the white space behind it none ends the text, whose tokens are counted."""
    thoughts = f"{'' if begun else ' <think>'}One\n\ntwo three</think>\n\n"
    answer = "One two\n\nthree"
    ids = [llm.tokenizer.encode(each, add_special_tokens=False) for each in (thoughts, answer)]  # type: ignore[union-attr]
    params = SamplingParams(stop=[stop], reasoning=ReasoningMarks("" if begun else "<think>", "</think>"))
    text = TextStream(llm.tokenizer, params)
    for token in ids[0] + ids[1]:
        text.push(token)
    text.finish()
    assert text.text.strip() == (thoughts + (answer if left is None else left)).strip()
    assert text.matched_stop == (stop if stop in answer else None)
    assert 0 <= len(ids[0]) - text.reasoning_tokens <= 2  # white space behind the mark


def test_no_reasoning_after_all(llm: LLM) -> None:
    ids = llm.tokenizer.encode("<thing> or <think>two</think>", add_special_tokens=False)  # type: ignore[union-attr]
    text = TextStream(
        llm.tokenizer, SamplingParams(stop=["two"], reasoning=ReasoningMarks("<think>", "</think>"))
    )
    for token in ids:
        text.push(token)
    assert text.matched_stop == "two" and text.reasoning_tokens == 0
    assert text.text == "<thing> or <think>"


def test_forms_without_reasoning(reading: Running) -> None:
    """The answer is the form's from its first character on."""
    for form, wanted in (({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[a-c]{3}"}, "[a-c]{3}")):
        for seed in range(3):
            body = {"messages": MESSAGES, "max_tokens": 60, "structured_outputs": form, "seed": seed}
            [choice] = reading.post(CHAT, body).json()["choices"]
            ended = choice["finish_reason"] == "stop"
            assert not ended or re.fullmatch(wanted, choice["message"]["content"])


def test_compressed_bodies(reading: Running) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()

    def send(data: bytes, encoding: str) -> int:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        return reading.client.post("/v1/completions", content=data, headers=headers).status_code

    packed = gzip.compress(body)
    assert send(packed, "gzip") == send(gzip.compress(body[:9]) + gzip.compress(body[9:]), "x-gzip") == 200
    assert send(zlib.compress(body), "deflate") == send(body, "Identity") == 200
    assert send(body, "gzip") == send(packed[:-9], "gzip") == 400
    assert send(packed, "zstd") == send(packed, "gzip, gzip") == 415
    assert send(gzip.compress(b" " * (20 * 2**20)), "gzip") == 413


def test_head_is_answered_as_get(reading: Running) -> None:
    port = int(reading.address.rpartition(":")[2])
    for path in ("/", "/health", "/v1/models", "/v1/models/none", "/nothing", "/stats/stream", CHAT):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("HEAD", path)
        response = connection.getresponse()
        assert response.read() == b""
        if path == "/stats/stream":  # which has no end
            assert response.status == 200
            continue
        asked = reading.client.get(path)
        assert response.status == asked.status_code
        assert response.headers.get("content-type") == asked.headers.get("content-type")
        assert "HEAD" not in response.headers.get("allow", "")


def test_a_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is computed a stream sends comments."""
    monkeypatch.setattr(server_http, "PING_SECONDS", 0.04)
    sent: list[bytes] = []

    async def late() -> AsyncIterator[str]:
        await asyncio.sleep(0.3)
        yield "data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    asyncio.run(EventStream(late(), ping=": wait\n\n")({}, receive, send))
    assert sent[-2:] == [b"data: 1\n\n", b""] and sent[1:-2] and set(sent[1:-2]) == {b": wait\n\n"}


def test_max_tokens_above_what_memory_holds() -> None:
    with LLM(kv_memory="1MiB") as small:
        params = SamplingParams(max_tokens=32000, ignore_eos=True)
        with pytest.raises(CapacityError):
            small.generate("Hi", params)
        request = small.new_request(small.tokenize("Hi"), params, cut_to_memory=True)
        small.submit_all([request])
        outputs = [output for _ in range(400) if small.has_unfinished for output in small.step()]
        answer = outputs[-1].outputs[0]
        assert answer.finish_reason == "length" and 100 < len(answer.token_ids) < 200
