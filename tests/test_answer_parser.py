"""Answers of chats: what is reasoning, content and a call, whole and however they are cut."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.tokenizer_kinds import EOS, byte_level
from tests.whole_message import message_of

from winnow.openai.answers import AnswerReader
from winnow.openai.response_templates import TEMPLATES
from winnow.openai.tools import CallRule
from winnow.outputs import CompletionOutput

TOKENIZER = byte_level()
END = TOKENIZER.convert_tokens_to_ids(EOS)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    }
]
# Channels as in gpt-oss: content has a mark of its own, text outside is dropped, an end token closes a call.
CHANNELS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=(?P<name>\w+)<\|message\|>",
            "close": ["<|call|>", EOS],
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LAX = {
    "start_anchor": "model\n",
    "fields": {
        "tool_calls": {
            "open": "<call:f>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<|q|>", "<|q|>"]]},
            "transform": {"function": {"name": "f", "arguments": "{content}"}},
        },
        "content": {"close": EOS},
    },
}
PYTHON = {
    "start_anchor": "model\n",
    "fields": {
        "tool_calls": {
            "open": "<calls>",
            "close": "</calls>",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
READERS = {
    name: AnswerReader.of(TOKENIZER, template)
    for name, template in {**TEMPLATES, "channels": CHANNELS, "lax": LAX, "python": PYTHON}.items()
}
FORCED = CallRule([TOOLS[0]["function"]], True)  # type: ignore[list-item]
THINKING = "<|im_start|>assistant\n<think>\n"


def whole(name: str, text: str, prompt: str = "", *, tools: bool = True, calls: Any = None) -> dict[str, Any]:
    """The message of an answer, its calls as pairs of name and arguments."""
    answer = CompletionOutput(0, text, [], finish_reason="stop")
    return plain(message_of(READERS[name], prompt, [answer], TOOLS if tools else [], calls))


def plain(message: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in message.items() if key != "role"}
    if "tool_calls" in found:
        functions = [call["function"] for call in found["tool_calls"]]
        found["tool_calls"] = [(each["name"], json.loads(each["arguments"])) for each in functions]
    return found


def call(arguments: Any, name: str = "f") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def coder(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        "HTML strikes a word out: <s>old</s> new.",
        "The mark <|im_end|> ends a turn.",
        "The mark is <|im_end|>",
        "Write <think> before you think, </think> behind.",
        "    return x\n",
        "\n\n- one\n- two\n",
        " \n",
        "<thin",
        "a <tool",
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "think"])
def test_text_is_what_the_model_wrote(name: str, text: str) -> None:
    for tools in (False, True):
        assert whole(name, text, tools=tools) == {"content": text}
        assert whole(name, text, "<|im_start|>assistant\n<think>\n\n</think>\n\n", tools=tools) == {
            "content": text
        }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hermes", call({"s": "see </tool_call> here"}), [("f", {"s": "see </tool_call> here"})]),
        ("hermes", call({"s": 'a "</tool_call>\\'}), [("f", {"s": 'a "</tool_call>\\'})]),
        ("hermes", call({}) + call({"n": 2}), [("f", {}), ("f", {"n": 2})]),
        ("hermes", call({"n": 1})[:-12], [("f", {"n": 1})]),  # complete but for its closing mark
        ("qwen3-coder", coder("</function>\n</tool_call>"), [("f", {"s": "</function>\n</tool_call>"})]),
        ("lax", "<call:f>{s: <|q|></call><|q|>}</call>", [("f", {"s": "</call>"})]),
        ("python", "<calls>[f(s='</calls>'), f()]</calls>", [("f", {"s": "</calls>"}), ("f", {})]),
        ("channels", '<|channel|>commentary to=f<|message|>{"s": "<|call|>"}<|call|>', [("f", {"s": "<|call|>"})]),
    ],
)  # fmt: skip
def test_a_closing_mark_in_an_argument_ends_nothing(name: str, text: str, message: Any) -> None:
    assert whole(name, text) == {"content": None, "tool_calls": message}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{nope}</tool_call>",
        ' <tool_call>{"name": 5}</tool_call> ',
        '<tool_call>["f"]</tool_call>\n',
        '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"s": "\\ud800"}}</tool_call>',
        '<tool_call>\n{"name": "f", "argum',
        "The tag <tool_call> begins one.",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert whole("hermes", text) == {"content": text}
    found = whole("hermes", text + call({}))
    if "argum" not in text or text.endswith("</tool_call>"):  # the open one holds what follows
        assert found == {"content": text.rstrip(), "tool_calls": [("f", {})]}


def test_calls_that_their_parser_would_take_half_are_text() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=t>\ny"
    assert whole("qwen3-coder", text) == {"content": text}


def test_calls_without_tools_are_text() -> None:
    for text in (f"Write {call({})}.", call({})):
        assert whole("hermes", text, tools=False) == {"content": text}


@pytest.mark.parametrize(
    ("text", "prompt", "message"),
    [
        ("<think>\nwhy\n</think>\n\nHello ", "", ("why", "Hello ")),
        ("\n<think>why</think>  Hello", "", ("why", "Hello")),
        ("why</think>\n\n    return x", THINKING, ("why", "    return x")),
        ("why", THINKING, ("why", "")),
        ("<think>\n\n</think>\n\nHello", "", (None, "Hello")),
        ("<think>a</think><think>b</think>", "", ("a", "<think>b</think>")),
        ("a</think><think> is a tag", "no turn is known here: <think>\n", ("a", "<think> is a tag")),
        # Another's mark in the conversation begins nothing.
        ("a</think>", "user: <think> is a tag\nassistant:", (None, "a</think>")),
        # The message continues: it has begun, and what the prompt holds of it is no answer.
        ("<think>", "<|im_start|>assistant\nThe mark is ", (None, "<think>")),
    ],
)
def test_reasoning_begins_a_turn(text: str, prompt: str, message: tuple[str | None, str]) -> None:
    thoughts, content = message
    expected = {"content": content} | ({} if thoughts is None else {"reasoning_content": thoughts})
    assert whole("think", text, prompt) == expected


def test_channels() -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|> Hi.\n<|return|>"
    assert whole("channels", text) == {"content": " Hi.\n", "reasoning_content": "why"}


def test_the_token_that_ends_a_turn_is_no_text() -> None:
    """Where marks are special tokens, all are shown: one is taken away at the end, or closes a call."""

    def message(name: str, text: str) -> dict[str, Any]:
        answer = CompletionOutput(0, text, [5, END], finish_reason="stop")
        reader = AnswerReader.of(TOKENIZER, READERS[name].template)
        return plain(message_of(reader, "", [answer], TOOLS, None))

    assert message("channels", f"<|channel|>final<|message|>{EOS}{EOS}") == {"content": EOS}
    named = '<|channel|>commentary to=f<|message|>{"n": 1}'
    assert message("channels", named + EOS) == {"content": None, "tool_calls": [("f", {"n": 1})]}
    # Elsewhere none is shown: such text was spelt out.
    assert message("hermes", f"It is {EOS}") == {"content": f"It is {EOS}"}


def test_demanded_calls_as_a_list() -> None:
    listed = '[{"name": "f", "arguments": {"s": "]</think>"}}, {"name": "g", "arguments": {}}]'
    calls = [("f", {"s": "]</think>"}), ("g", {})]
    one = CallRule([TOOLS[0]["function"]], False, demanded=False)
    two = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    assert whole("hermes", f"Both. {two}", calls=one) == {"content": "Both.", "tool_calls": [("f", {})]}
    assert whole("think", listed, calls=FORCED) == {"content": None, "tool_calls": calls}
    assert whole("think", f"why</think>\n{listed}", THINKING, calls=FORCED) == {
        "content": None,
        "reasoning_content": "why",
        "tool_calls": calls,
    }
    assert whole("think", listed[:-9], calls=FORCED) == {"content": listed[:-9]}  # cut off


@pytest.mark.parametrize(
    ("name", "prompt", "text", "calls"),
    [
        ("hermes", "", f"<think>{call({})}</think>\nTo f: {call({'s': '</tool_call>'})}", 1),
        ("hermes", THINKING, f"why</think>\n<tool_call>{{nope}}</tool_call>{call({})}", 1),
        ("qwen3-coder", "", coder("</function>\n</tool_call>"), 1),
        ("lax", "", "<call:f>{s: <|q|></call><|q|>}</call>", 1),
        ("channels", "", '<|channel|>commentary to=f<|message|>{"s": "<|call|>"}<|call|>', 1),
        ("unclosed", "", '[CALLS]{"name": "f", "arguments": {"s": {"t": "}"}}}', 1),
        ("hermes", "", "No call.", 0),
        ("unclosed", "", '[CALLS]{"name": "f"', 0),
    ],
)
def test_a_message_is_complete_with_its_call(name: str, prompt: str, text: str, calls: int) -> None:
    """With the last character of its mark, neither before nor behind; what follows is none of it."""
    unclosed = {"start_anchor": "Answer:", "fields": {"content": {}, "tool_calls": {
        "open": "[CALLS]", "content": "json", "transform": {"type": "function", "function": "{content}"}}}}  # fmt: skip
    reader = {**READERS, "unclosed": AnswerReader.of(TOKENIZER, unclosed)}[name]
    one = CallRule([TOOLS[0]["function"]], False, demanded=False)  # type: ignore[list-item]
    parser = reader.parser(prompt, TOOLS, one)
    assert [parser.completes(each) for each in text] == [False] * (len(text) - 1) + [calls == 1]
    several = reader.parser(prompt, TOOLS, None)
    assert not any(several.completes(each) for each in text)
    for rest in ("", "x") if name != "unclosed" else ("",):
        answer = CompletionOutput(0, text + rest * calls, [], finish_reason="stop")
        message = message_of(reader, prompt, [answer], TOOLS, one)
        assert len(message.get("tool_calls", ())) == calls
        assert not (message["content"] or "").endswith("x")


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", call({}), call({"s": "</tool_call>"}), "<", "<t", "</",
        '{"name": "f", "arguments": {', '"', "\\", "}}", " ", "\n", "\n  ", "x", "<function=f>", "</function>",
        "<parameter=s>", "</parameter>", coder("a"), "<call:f>", "</call>", "{s: <|q|>", "<|q|>}", "<calls>[f(a='",
        "')]</calls>", "<|channel|>", "analysis<|message|>", "final<|message|>", "commentary to=f", "<|message|>",
        "<|end|>", "<|call|>", EOS, "[", '[{"name": "f", "arguments": {}}]',
    ]
)  # fmt: skip


@given(data=st.data(), name=st.sampled_from(sorted(READERS)), texts=st.lists(PIECES, max_size=14))
def test_pieces_joined_are_the_whole(data: st.DataObject, name: str, texts: list[str]) -> None:
    """However an answer is cut, and however much of it is marks."""
    reader, text = READERS[name], "".join(texts)
    tools = TOOLS if data.draw(st.booleans(), "tools") else []
    one = CallRule([TOOLS[0]["function"]], False, demanded=False)  # type: ignore[list-item]
    forced = data.draw(st.sampled_from([None, FORCED, one]), "calls") if tools else None
    anchor = {"channels": "<|start|>assistant", "lax": "model\n", "python": "model\n"}.get(
        name, "<|im_start|>assistant\n"
    )
    prompt = anchor + data.draw(
        st.sampled_from(["", "<think>\n", " ", "Sure ", "<tool_call>{", "<think>a"]), "prompt"
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), "cuts"))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parser = reader.parser(prompt, tools, forced)
    deltas = [CompletionOutput(0, part, []) for part in parts]
    deltas.append(CompletionOutput(0, "", [], finish_reason="stop"))
    pieces = [piece for delta in deltas for piece in parser.read(delta)]
    message = plain(message_of(reader, prompt, deltas, tools, forced))
    answer = CompletionOutput(0, text, [], finish_reason="stop")
    assert message == plain(message_of(reader, prompt, [answer], tools, forced))
    assert tools or "tool_calls" not in message
    # In order, and nothing that the model did not write.
    rest = re.sub(r"\s", "", text)
    for piece in pieces:
        if isinstance(piece.value, str):
            own = re.sub(r"\s", "", piece.value)
            assert own in rest
            rest = rest[rest.index(own) + len(own) :]
    if not tools and name != "channels" and "<think>" not in prompt + text:
        assert message == {"content": text}


@pytest.mark.parametrize("part", ["<tool_call>", "<tool_call>{", '"', '<tool_call>{}</tool_call>"', " ", "<"])
def test_long_answers_of_marks_alone(part: str) -> None:
    """Read a few thousand characters at a time, and as such the text that they are."""
    text = part * (20_000 // len(part))
    assert whole("hermes", text) == {"content": text}
