"""Images in the bodies of each API: one list of sources, in the order in which the template has their places."""

from typing import Any

import pytest

from winnow.anthropic.request import chat_body
from winnow.batch.lines import BadLine, parse_line
from winnow.batch.reader import RawLine
from winnow.errors import WinnowError
from winnow.openai import responses
from winnow.openai.request import Endpoint, read_body
from winnow.prompt.messages import take_images
from winnow.values.json_values import dump_json

A, B = "data:image/png;base64,AAAA", "https://images.test/b.png"
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


OPENAI = [
    {
        "role": "user",
        "content": [
            text("Before"),
            {"type": "image_url", "image_url": {"url": A, "detail": "high"}},
            {"type": "image_url", "image_url": {"url": B}},
        ],
    },
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "And?"},
]
# What langchain_openai 1.x sends of HumanMessage([text, {"type": "image", "base64": ..., "mime_type": "image/png"}]).
LANGCHAIN = {
    "messages": [
        {"content": "Look closely.", "role": "system"},
        {
            "content": [
                text("Before"),
                {"type": "image_url", "image_url": {"url": A}},
                {"type": "image_url", "image_url": {"url": B}},
            ],
            "role": "user",
        },
    ],
    "model": "winnow-demo",
    "stream": False,
    "temperature": 0.0,
}  # fmt: skip
ANTHROPIC = {
    "model": "winnow-demo",
    "max_tokens": 5,
    "messages": [
        {"role": "user", "content": [
            text("Before"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            {"type": "image", "source": {"type": "url", "url": B}, "cache_control": {"type": "ephemeral"}},
        ]},
    ],
}  # fmt: skip
RESPONSES = {
    "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "Before"},
            {"type": "input_image", "image_url": A, "detail": "auto"},
            {"type": "input_image", "image_url": B},
        ]},
    ],
}  # fmt: skip


def chat(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    messages = read_body(Endpoint.CHAT, body, {}, served=True).messages
    return take_images(messages)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": OPENAI}, LANGCHAIN, chat_body(ANTHROPIC),
        responses.chat_body(RESPONSES, responses.input_items(RESPONSES, lambda _: None)),
    ],
    ids=["openai", "langchain", "anthropic", "responses"],
)  # fmt: skip
def test_images_of_each_api(body: dict[str, Any]) -> None:
    messages, sources = chat(body)
    assert sources == [A, B]
    assert next(each for each in messages if each["role"] == "user")["content"] == [
        text("Before"),
        IMAGE,
        IMAGE,
    ]


def test_images_of_tools() -> None:
    """Templates write a tool's result as text, so its images stand at the beginning of the user's turn behind it."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [text("seen"), {"type": "image", "source": source}],
    }
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, text("Well?")]},
    ]
    messages, sources = chat(chat_body(ANTHROPIC | {"messages": turns}))
    assert sources == [A]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "user"]
    assert messages[2]["content"] == "seen" and messages[3]["content"] == [IMAGE, text("Well?")]

    called = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": A}]
    items = [
        {"role": "user", "content": "Look."},
        called,
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    messages, sources = chat(responses.chat_body({}, items))
    assert sources == [A] and messages[-1]["content"] == [text("seen"), IMAGE]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "image"}, r"content\[0\].source.type must be base64 or url"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "must be base64 or url, got 'file'"),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "source.media_type must be text"),
        ({"type": "image", "source": {"type": "base64", "media_type": "", "data": 5}}, "source.data must be text"),
        ({"type": "image", "source": {"type": "url"}}, "source.url must be text"),
        ({"type": "audio", "source": {}}, "must be a text or image or .*block, got type 'audio'"),
    ],
)  # fmt: skip
def test_blocks_that_are_wrong_are_named(block: dict[str, Any], message: str) -> None:
    for content in ([block], [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]):
        with pytest.raises(WinnowError, match=message.replace(r"content\[0\].source", "source")):
            chat_body(ANTHROPIC | {"messages": [{"role": "user", "content": content}]})
    for role, name in (("assistant", "messages"), ("system", "messages")):
        with pytest.raises(WinnowError, match=f"{name}.* must be a text block"):
            chat_body(ANTHROPIC | {"messages": [{"role": role, "content": [block]}]})


@pytest.mark.parametrize("prompt", ["<image> What?", [1, 2, 3]])
def test_lines_of_prompts_with_images(prompt: Any) -> None:
    images = {"image": ["a.png", A]}
    line = {"prompt": prompt, "multi_modal_data": images, "max_tokens": 3}
    parsed = parse_line(RawLine(0, 1, dump_json(line).encode()), {})
    assert not isinstance(parsed, BadLine)
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    assert parsed.asked.prompt == {key: prompt, "multi_modal_data": images}
    assert parsed.asked.params.max_tokens == 3


def test_other_modalities_are_refused() -> None:
    from winnow import LLM

    with LLM(kv_memory="16MiB", max_num_seqs=2) as llm:
        for data, message in (
            ({"image": ["https://images.test/a.png"]}, "images cannot be read"),
            ({"audio": [1]}, "got 'audio'"),
            ([A], "got list"),
        ):
            with pytest.raises(WinnowError, match=message):
                llm.generate({"prompt": "Hi", "multi_modal_data": data})
        with pytest.raises(WinnowError, match="images cannot be read"):
            llm.chat(OPENAI)
