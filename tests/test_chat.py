"""Conversations become text by the model's own template."""

import json
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow.models import DEMO_MODEL
from winnow.models.model.tokens import load_tokenizer
from winnow.prompt.chat import TemplateOptions, apply_template
from winnow.prompt.messages import MarkedText, normalise_messages, take_images, text_length

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


DOCUMENT = "Tom likes chess. Ann lives in Vienna."
MARKED = [
    {"type": "text", "text": DOCUMENT, "winnow": {"context": True}},
    {"type": "text", "text": "Where does Ann live?"},
]


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m.content.strip() }}]{% endfor %}"])
def test_a_mark_ends_the_context(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Wherever it stands, of what the template makes."""
    if template is not None:
        tokenizer.chat_template = template
    for before, behind in (([], []), ([{"role": "system", "content": DOCUMENT}], history()[1:])):
        prompt = apply_template(tokenizer, [*before, {"role": "user", "content": MARKED}, *behind])
        judged = tokenizer.decode(prompt.token_ids[: prompt.context_tokens])
        assert judged.endswith("lives in Vienna.") and judged.count("Ann") == 1 + len(before)
        assert prompt.text is not None and "Vienna.\nWhere" in prompt.text
    assert apply_template(tokenizer, [{"role": "user", "content": MARKED[1:]}]).context_tokens == 0


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "text", "text": "a", "winnow": {"context": 1}}, 'must be {"context": true}, {"document'),
        ({"type": "text", "text": "a", "winnow": {"contxt": True}}, 'must be {"context": true}, {"document'),
        ({"type": "image", "image": "x", "winnow": {"context": True}}, "needs parts of text alone"),
    ],
)
def test_marks_that_mean_nothing_are_named(part: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        normalise_messages([{"role": "user", "content": [part]}])


def test_the_engine_gets_the_marked_tokens() -> None:
    with LLM(kv_memory="16MiB") as llm:
        prompt = llm.tokenize_chat([{"role": "user", "content": MARKED}])
        assert llm.new_request(prompt, SamplingParams()).params.context_tokens == prompt.context_tokens > 0
        with pytest.raises(InvalidRequestError, match="context_tokens and a mark"):
            llm.new_request(prompt, SamplingParams(context_tokens=3))
        plain = llm.tokenize(MarkedText(f"{DOCUMENT}\n\nWhere?", len(DOCUMENT)))
        assert plain.context_tokens == len(llm.tokenize(DOCUMENT).token_ids) < len(plain.token_ids)


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


def test_nothing_stands_for_no_arguments_and_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    shown = "{{ messages[0].content }}{{ messages[0].reasoning_content }}"
    for more in ({"content": None}, {}):
        for name in ("reasoning_content", "reasoning"):
            message = {"role": "assistant", name: "I think", **more}
            assert text(tokenizer, shown, [message]) == "I think"
    names = (
        "{% for name, value in messages[0].tool_calls[0].function.arguments | items %}{{ name }}{% endfor %}"
    )
    for given in ({"arguments": each} for each in (None, "null", "", " ", '""', {}, [])):
        call = {"function": {"name": "f", **given}}
        assert text(tokenizer, names, [{"role": "assistant", "tool_calls": [call]}]) == ""
    assert text(tokenizer, names, [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]) == ""


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
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            ],
            r"content of messages\[1\] must be text and images; parts of other kinds .* 'input_audio'",
        ),
    ],
)
def test_unusable_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        normalise_messages(messages)


X = "https://a.test/x.png"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image_url", "image_url": {"url": X, "detail": "low"}}, X),
        ({"type": "image_url", "image_url": X}, X),
        ({"image_url": {"url": X}}, X),
        ({"type": "image_url", "image_url": {"url": X}, "uuid": "a", "cache_control": {}}, X),
        ({"type": "input_image", "image_url": X, "detail": "auto", "file_id": None}, X),
        ({"type": "image_pil", "image_pil": b"pixels"}, b"pixels"),
        ({"type": "image", "image": b"pixels"}, b"pixels"),
        ({"type": "image", "url": X}, X),
        ({"type": "image", "path": "x.png"}, "x.png"),
        (
            {"type": "image_url", "image_url": {"detail": "low"}},
            "image_url of messages[1] must be a URL, got null",
        ),
        ({"type": "image_url", "image_url": 7}, "must be a URL, got a number"),
        ({"type": "input_image", "image_url": None}, "must be a URL, got null"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id of an image of messages[1] is not served"),
        (
            {"type": "image_url", "image_url": {"url": X, "detail": "most"}},
            "detail of messages[1] must be auto",
        ),
        ({"type": "image"}, "an image of messages[1] must have"),
        ({"type": ["image"]}, "parts of other kinds"),
    ],
)
def test_images_in_every_form(part: dict[str, Any], source: Any) -> None:
    """A template reads places; the sources stand beside, in order. Normalised messages are read again as they are."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}, part]},
        {"role": "user", "content": [{"type": "image", "image": 2}, {"type": "text", "text": "d"}]},
    ]
    if isinstance(source, str) and " " in source:
        with pytest.raises(InvalidRequestError, match=re.escape(source)):
            take_images(messages)
        return
    for given in (messages, normalise_messages(messages)):
        found, sources = take_images(given)
        assert sources == [source, 2]
        assert [each["content"] for each in found] == [
            "a\nb",
            [{"type": "text", "text": "c"}, {"type": "image"}],
            [{"type": "image"}, {"type": "text", "text": "d"}],
        ]
        assert [text_length(each) for each in found] == [3, 1, 1]


# As SmolVLM's: it reads lists of parts alone.
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}|{% endfor %}"
)
IMAGE = {"role": "user", "content": [{"type": "image", "image": 1}, {"type": "text", "text": "What?"}]}


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PARTS, "system:Be brief.|user:Hi|assistant:Ho|user:<image>What?|"),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", None),
        (PARTS.replace("m.content %}", "(m.content if m.content is not string else [{'type': 'text', 'text': '<s>' + "
         "m.content}]) %}"), "system:<s>Be brief.|user:<s>Hi|assistant:<s>Ho|user:<image>What?|"),
    ],
)  # fmt: skip
def test_templates_get_the_form_that_they_read(
    template: str, shown: str | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    if shown is not None:
        assert text(tokenizer, template, take_images([*first, IMAGE])[0]) == shown
    texts = [*first, {"role": "user", "content": "What?"}]
    expected = (
        "Be brief.|Hi|Ho|What?|"
        if shown is None
        else shown.replace("<image>", "<s>" if "<s>" in shown else "")
    )
    assert text(tokenizer, template, texts) == expected
