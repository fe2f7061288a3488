"""Conversations become text by the model's own template."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from winnow.chat import TemplateOptions, apply_template, normalise_messages
from winnow.errors import InvalidRequestError
from winnow.models import DEMO_MODEL
from winnow.models.load.tokens import load_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    " {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(DEMO_MODEL)
    assert found is not None
    return found


def text(tokenizer: Any, template: str, messages: Any) -> str:
    tokenizer.chat_template = template
    return apply_template(tokenizer, messages)[0]


def history(**assistant: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL], **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]


@pytest.mark.parametrize(
    ("assistant", "shown"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "Let me"}, {"type": "text", "text": "see."}]}, "Let me\nsee."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": None, "refusal": "I will not."}, "I will not."),
    ],
)
def test_content_beside_tool_calls(
    assistant: dict[str, Any], shown: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    found = text(tokenizer, TEMPLATE, history(**assistant))
    assert found == f"[user]Weather?[assistant]{shown}<weather city=Bonn>[tool]sunny"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "[system]Be brief.[user]Hi"),
        # "developer" of its prose is no role.
        (
            "{# By its developer. #}{% for m in messages %}{% if m.role not in ['system', 'user'] %}"
            "{{ raise_exception('role') }}{% endif %}{{ m.content }}{% endfor %}",
            "Be brief.Hi",
        ),
        (
            '{% for m in messages %}{% if m.role == "developer" %}<dev>{% endif %}{{ m.content }}{% endfor %}',
            "<dev>Be brief.Hi",
        ),
    ],
)
def test_developers_are_the_system_to_templates_that_know_none(
    template: str, shown: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert text(tokenizer, template, messages) == shown
    assert text(tokenizer, {"default": template}, messages) == shown  # type: ignore[arg-type]


def test_arguments_that_are_no_object_stay_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    for arguments in ("[1]", "{", '"x"'):
        call = {"function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        assert text(tokenizer, "{{ messages[0].tool_calls[0].function.arguments }}", messages) == arguments


def test_tools_are_shown_without_what_tells_the_server(tokenizer: PreTrainedTokenizerBase) -> None:
    shown = {"name": "f", "parameters": {"strict": True}, "return": {"type": "string"}}
    for more in ({"strict": True}, {"strict": None, "description": None}, {"defer_loading": False}):
        tool = {"type": "function", "function": {**shown, **more}, "cache_control": {"type": "ephemeral"}}
        options = TemplateOptions(tools=[tool])
        tokenizer.chat_template = "{{ tools | tojson }}"
        found = apply_template(tokenizer, [{"role": "user", "content": "Hi"}], options).text
        assert json.loads(str(found)) == [{"type": "function", "function": shown}]


def test_the_template_speaks_for_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    template = "{{ raise_exception('Roles must alternate user/assistant') }}"
    with pytest.raises(InvalidRequestError, match="chat template: Roles must alternate user/assistant"):
        text(tokenizer, template, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message, got none"),
        ("hi", "at least one message, got a text"),
        ({"role": "user", "content": "hi"}, "at least one message, got an object"),
        (["hi"], r"messages\[0\] must be an object with role and content"),
        ([{"content": "hi"}], r"messages\[0\] must be an object with role"),
        ([{"role": "user"}], r"content of messages\[0\] must be text, .* got none"),
        ([{"role": "user", "content": None}], r"content of messages\[0\] must be text, .* got null"),
        ([{"role": "user", "content": 7}], r"content of messages\[0\] must be text, .* got a number"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "got null"),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
            ],
            r"content of messages\[1\] must be text; parts of other kinds .* 'image_url'",
        ),
    ],
)
def test_unusable_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        normalise_messages(messages)
