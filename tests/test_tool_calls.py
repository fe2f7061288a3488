"""Grammars of demanded tool calls: what they take, by the form of the model's calls."""

import json
import re
from typing import Any

import pytest
from tests.tokenizer_kinds import EOS, byte_level
from tests.whole_message import message_of

from winnow.errors import ConfigError
from winnow.openai.answers import AnswerReader
from winnow.openai.calls import CallForm
from winnow.openai.response_templates import TEMPLATES, recognise
from winnow.openai.tools import CallRule
from winnow.outputs import CompletionOutput
from winnow.sampling import SamplingParams
from winnow.sampling.grammar import GrammarCompiler

pytest.importorskip("llguidance")

ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
STOP = {"name": "stop", "description": "without parameters"}
ONE, ANY = CallRule([ADD, STOP], False), CallRule([ADD, STOP], True)
HERMES = TEMPLATES["hermes"]
NAME_BEFORE = {
    "start_anchor": "Answer:",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<\|call\|>call:(?P<name>[^{\n(]+)",
            "close": ["<|end|>", "<|stop|>"],
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
TWO = '[{"name": "add", "arguments": {"a": 3}}, {"name": "stop", "arguments": {}}]'
STOP_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


TURN = "<|im_start|>assistant\n"


def takes(
    template: Any,
    forced: CallRule | None,
    prompt: str,
    text: str,
    special: list[str] | None = None,
    params: SamplingParams | None = None,
) -> bool:
    """Whether an answer may be `text`, and may end there."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": special or []})
    reader = AnswerReader(tokenizer, template)
    tools = [] if forced is None else [{"function": each} for each in forced.functions]
    bound = reader.bind(params or SamplingParams(), prompt, tools, forced)
    assert bound.form is not None
    end = tokenizer.convert_tokens_to_ids(EOS)
    matcher = GrammarCompiler(tokenizer, len(tokenizer), frozenset([end])).matcher(bound.form)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return bool(matcher.allowed()[end])


@pytest.mark.parametrize(
    ("template", "forced", "prompt", "text", "taken"),
    [
        (HERMES, ONE, "", CALL, True),
        (HERMES, ONE, "", STOP_CALL, True),
        (HERMES, ONE, "", CALL + CALL, False),
        (HERMES, ANY, "", f"{CALL}\n{STOP_CALL}{CALL}", True),
        (HERMES, ANY, "", "", False),
        (HERMES, ANY, "", "Sure! " + CALL, False),
        (HERMES, ANY, "", CALL.replace("3", '"3"'), False),
        (HERMES, ANY, "", CALL.replace("add", "sub"), False),
        (HERMES, ANY, "", STOP_CALL.replace("{}", '{"a": 3}'), False),
        # Reasoning may stand before calls, where the model reasons; where the prompt opens it, it must.
        (HERMES, ANY, "", f"<think>3 it is</think>\n\n{CALL}", True),
        (HERMES, ANY, "", "<think>3 it is</think>", False),
        (HERMES, ANY, "<|im_start|>assistant\n<think>\n", f"3 it is</think>{CALL}", True),
        (HERMES, ANY, "<|im_start|>assistant\n<think>\n", "3 it is", False),
        (HERMES, ANY, "<|im_start|>assistant\n<think>\n\n</think>\n\n", CALL, True),
        (NAME_BEFORE, ONE, "", '<|call|>call:add{"a": 3}<|end|>', True),
        (NAME_BEFORE, ANY, "", '<|call|>call:add{"a": 3}<|end|>' * 2, False),
        (NAME_BEFORE, ONE, "", '<|call|>call:sub{"a": 3}<|end|>', False),
        (TEMPLATES["qwen3-coder"], ANY, "", TWO, True),
        (TEMPLATES["think"], ONE, "", '<think>hm</think>[{"name": "stop", "arguments": {}}]', True),
        (None, ANY, "", TWO, True),
        (None, ONE, "", TWO, False),
    ],
)  # fmt: skip
def test_answers_that_are_taken(template: Any, forced: CallRule, prompt: str, text: str, taken: bool) -> None:
    assert takes(template, forced, prompt, text) is taken
    if taken:
        answer = CompletionOutput(0, text, [], finish_reason="stop")
        tools = [{"function": each} for each in forced.functions]
        message = message_of(AnswerReader(byte_level(), template), prompt, [answer], tools, forced)
        assert len(message["tool_calls"]) == len(re.findall("add|stop", text))


@pytest.mark.parametrize(
    ("template", "text", "taken"),
    [
        (HERMES, "yes", True),
        (HERMES, "\nyes", False),
        (HERMES, "<think>hm</think>\n\nyes", True),
        (HERMES, CALL, True),
        (HERMES, f"<think>hm</think>\n{CALL}", True),
        (HERMES, CALL + CALL, False),
        (HERMES, "Sure!", False),
        (HERMES, CALL.replace("3", '"3"'), False),
        (TEMPLATES["qwen3-coder"], "<tool_call><function=add>\n</function>\n</tool_call>", True),
        (NAME_BEFORE, '<|call|>call:add{"a": 3}<|end|>', True),
        (TEMPLATES["think"], CALL, False),
    ],
)
def test_calls_in_the_place_of_a_form(template: Any, text: str, taken: bool) -> None:
    """Under `auto` the answer has the form, or is calls; without reasoning it begins at once."""
    params = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    rule = CallRule([ADD, STOP], False, demanded=False)
    assert takes(template, rule, "", text, params=params) is taken


@pytest.mark.parametrize(
    ("form", "own", "other"),
    [
        ({"json": {"enum": [True, "</think>"]}}, ["true", '"</think>"'], "1"),
        ({"regex": "a/b+"}, ["a/bb"], "a/"),
        ({"choice": ["yes", "<think>no"]}, ["yes", "<think>no"], "no"),
        ({"grammar": 'start: thoughts "!"\nthoughts: "a" | "b"'}, ["a!"], "a"),
        ({"json_object": True}, ['{"a": 1}'], "[]"),
    ],
)
def test_forms_bind_what_stands_behind_the_reasoning(form: Any, own: list[str], other: str) -> None:
    begun, closed = f"{TURN}<think>\n", f"{TURN}<think>\n\n</think>\n\n"
    params = SamplingParams(structured_outputs=form)
    for text in own:
        for name, prompt, before, taken in [
            ("think", begun, "it is", False),
            ("think", begun, "it is</think>\n\n", True),
            ("think", begun, "", False),
            ("think", TURN, "<think>it is</think>", True),
            ("think", TURN, "", True),
            ("think", closed, "", True),
            ("think", closed, "<think>it is</think>", False),
            (None, begun, "", True),
            (None, begun, "it is</think>", False),
        ]:
            found = takes(TEMPLATES[name] if name else None, None, prompt, before + text, params=params)
            assert found is taken, (prompt, before + text)
        assert not takes(TEMPLATES["think"], None, begun, "it is</think>" + other, params=params)


def test_marks_that_are_tokens_of_their_own() -> None:
    special = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    assert takes(HERMES, ANY, "", f"<think>hm</think>{CALL}", special)
    assert not takes(HERMES, ANY, "", f"<think>hm</think>{CALL[:-3]}", special)


def test_names_are_spelt_out() -> None:
    """A name is text, whatever it holds: no part of the grammar."""
    name = 'a" | /.*/ "\\n<x>'
    forced = CallRule([{"name": name}], False)
    assert takes(None, forced, "", f'[{{"name": {json.dumps(name)}, "arguments": {{}}}}]')
    assert not takes(None, forced, "", "anything")


@pytest.mark.parametrize(
    "change",
    [
        {"content": "xml-inline"},
        {"content_args": {"unquoted_keys": True}},
        {"open_pattern": r"<call=\d+>", "open": None},
        {"close_pattern": "</a>|</b>", "close": None},
        {"transform": {"function": {"name": "{content.f}", "arguments": "{content.p}"}}},
    ],
)
def test_forms_that_are_no_json_between_fixed_texts(change: dict[str, Any]) -> None:
    fields = HERMES["fields"]
    assert CallForm.of(HERMES) is not None
    assert (
        CallForm.of({**HERMES, "fields": {**fields, "tool_calls": {**fields["tool_calls"], **change}}})
        is None
    )
    assert CallForm.of(None) is None


def test_chat_templates_show_the_form() -> None:
    assert recognise("<think></think>{{ '<tool_call>\\n' }}") is TEMPLATES["hermes"]
    coder = recognise({"default": "", "tool_use": "<tool_call>\n<function=x>"})
    assert coder is not None and list(coder["fields"]) == ["tool_calls", "content"]  # no reasoning is shown
    assert recognise("{% if '</think>' in content %}") is TEMPLATES["think"]
    assert recognise("{{ messages }}") is None
    assert recognise(None) is None


@pytest.mark.parametrize("written", ["null", '""', "{}", '"null"'])
def test_calls_without_arguments_have_an_empty_object(written: str) -> None:
    text = f'<tool_call>\n{{"name": "stop", "arguments": {written}}}\n</tool_call>'
    answer = CompletionOutput(0, text, [], finish_reason="stop")
    found = message_of(AnswerReader.of(byte_level(), HERMES), TURN, [answer], [{"function": STOP}], None)
    assert [each["function"]["arguments"] for each in found["tool_calls"]] == ["{}"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_known_forms_are_read(name: str) -> None:
    """By this transformers, oldest and newest alike."""
    reader = AnswerReader.of(byte_level(), TEMPLATES[name])
    call = {
        "hermes": CALL,
        "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>",
    }
    prompt = "<|im_start|>user\n<think><|im_start|>assistant\n<think>\n"
    text = "why</think>\n\nHello" + call.get(name, "")
    answer = CompletionOutput(0, text, [], finish_reason="stop")
    found = message_of(reader, prompt, [answer], [{"function": ADD}], None)
    assert found["reasoning_content"] == "why" and found["content"] == "Hello"
    if name in call:
        [function] = [each["function"] for each in found["tool_calls"]]
        assert function["name"] == "add" and json.loads(function["arguments"]) == {"a": 3}


def test_templates_that_cannot_be_used() -> None:
    tokenizer = byte_level()
    tokenizer.response_template, tokenizer.chat_template = {"version": 9}, "<think></think>"
    assert AnswerReader.of(tokenizer).template == TEMPLATES["think"]
    tokenizer.response_template = NAME_BEFORE
    assert AnswerReader.of(tokenizer).template == NAME_BEFORE
    with pytest.raises(ConfigError, match="fields"):
        AnswerReader.of(tokenizer, {})
    with pytest.raises(ConfigError, match="start_anchor"):
        AnswerReader.of(byte_level(), {"fields": {"content": {"content": "text"}}})
    with pytest.raises(ConfigError, match="tokenizer"):
        AnswerReader.of(None, HERMES)
