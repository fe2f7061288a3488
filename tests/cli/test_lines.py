"""Every form of an input line, and every way to get one wrong."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from winnow.batch.lines import BadLine, Job, parse_line
from winnow.batch.reader import RawLine
from winnow.openai.request import Endpoint
from winnow.prompt.messages import MarkedText
from winnow.sampling import SamplingParams


def parse(line: Any, **defaults: Any) -> Job | BadLine:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(RawLine(index=4, number=6, data=data), defaults)


def batch(url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def job(line: Any, **defaults: Any) -> Job:
    parsed = parse(line, **defaults)
    assert isinstance(parsed, Job), parsed
    return parsed


def test_a_flat_prompt() -> None:
    parsed = job(
        {"prompt": "Hi", "max_tokens": 3, "custom_id": 7, "reference": "yes", "metadata": {"k": [1]}}
    )
    assert (parsed.index, parsed.number, parsed.endpoint, parsed.asked.prompt) == (4, 6, None, "Hi")
    assert parsed.asked.params == SamplingParams(max_tokens=3)
    assert parsed.carried == {"custom_id": 7, "reference": "yes", "metadata": {"k": [1]}}


def test_a_context_field_stands_before_the_question() -> None:
    for line in (
        {"prompt": "Who?"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Who?"}]},
    ):
        raw = RawLine(4, 6, json.dumps({**line, "article": "Ann."}).encode())
        parsed = parse_line(raw, {}, context_field="article")
        assert isinstance(parsed, Job), parsed
        asked = parsed.asked.prompt or parsed.asked.messages[-1]["content"]  # type: ignore[index]
        assert asked == "Ann.\n\nWho?" and isinstance(asked, MarkedText) and asked.context_end == 4
        assert not isinstance(parse_line(raw, {}), Job), "a field that nothing names is a mistyped one"
    unusable = parse_line(RawLine(4, 6, b'{"prompt": [5], "article": "Ann."}'), {}, context_field="article")
    assert isinstance(unusable, BadLine) and "needs a prompt" in str(unusable.error)


def test_flat_token_ids_and_messages() -> None:
    assert job({"prompt": [1, 2]}).asked.prompt == [1, 2]
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert job({"messages": messages}).asked.messages == [{"role": "user", "content": "a\nb"}]


def test_the_line_wins_over_the_flags_and_the_flags_over_the_defaults() -> None:
    params = job({"prompt": "a", "temperature": 0.5}, temperature=0.9, top_k=4).asked.params
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 4, 1.0)


def test_null_stands_for_the_flag_and_in_max_tokens_for_no_limit() -> None:
    params = job(
        {"prompt": "a", "temperature": None, "max_tokens": None}, temperature=0.9, max_tokens=5
    ).asked.params
    assert (params.temperature, params.max_tokens) == (0.9, None)


def test_logit_bias_has_text_for_keys() -> None:
    assert job({"prompt": "a", "logit_bias": {"5": -1}}).asked.params.logit_bias == {5: -1.0}


def test_a_batch_completion() -> None:
    line = batch(prompt=["Hi"], model="m", max_tokens=3, logprobs=2, user="u", stream=False, top_k=5)
    parsed = job({**line, "reference": "yes"})
    assert (parsed.endpoint, parsed.asked.prompt, parsed.asked.model) == (Endpoint.COMPLETION, "Hi", "m")
    assert parsed.asked.params == SamplingParams(max_tokens=3, logprobs=2, top_k=5)
    assert parsed.carried == {"custom_id": "a", "reference": "yes"}


def test_a_batch_chat_follows_the_defaults_of_openai() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    parsed = job(batch(Endpoint.CHAT.value, messages=messages, logprobs=True, top_logprobs=2))
    assert (parsed.endpoint, parsed.asked.messages) == (Endpoint.CHAT, messages)
    assert (parsed.asked.params.max_tokens, parsed.asked.params.logprobs) == (None, 2)
    assert job(batch(Endpoint.CHAT.value, messages=messages), max_tokens=9).asked.params.max_tokens == 9
    limited = job(batch(Endpoint.CHAT.value, messages=messages, max_completion_tokens=4), max_tokens=9)
    assert limited.asked.params.max_tokens == 4


BAD_LINES: list[tuple[Any, str, str]] = [
    (b"{nope", "invalid_json", "unreadable JSON: .* at column 2"),
    (b'{"prompt": "\xff"}', "invalid_json", "not UTF-8"),
    (b'{"prompt": "\\ud800"}', "invalid_json", "not UTF-8"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN is not a finite number"),
    (b'{"prompt": "a", "metadata": 1e999}', "invalid_json", "not a finite number"),
    (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "invalid_json", "unreadable JSON"),
    (b"[" * 100_000, "invalid_json", "unreadable JSON"),
    ([1], "invalid_json", "must be a JSON object, got a list"),
    ({}, "invalid_request", "either prompt or messages"),
    ({"prompt": "a", "messages": []}, "invalid_request", "either prompt or messages"),
    ({"prompt": ""}, "invalid_request", "prompt must not be empty"),
    ({"prompt": []}, "invalid_request", "prompt must not be empty"),
    ({"prompt": None}, "invalid_request", "prompt must be text or a list of token ids, got null"),
    ({"prompt": [1, -1]}, "invalid_request", "token ids from 0 on"),
    ({"prompt": [True]}, "invalid_request", "token ids"),
    ({"prompt": ["a"]}, "invalid_request", "token ids"),
    ({"messages": []}, "invalid_request", "at least one message"),
    ({"messages": ["hi"]}, "invalid_request", "role and content"),
    (
        {"messages": [{"role": "user"}]},
        "invalid_request",
        r"content of messages\[0\] must be text, .* got none",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "invalid_request",
        r"image_url of messages\[0\] must be a URL, got null",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "multi_modal_data": {}},
        "invalid_request",
        "goes with a prompt",
    ),
    ({"prompt": "a", "temperature": -1}, "invalid_request", "temperature must be at least 0, got -1"),
    ({"prompt": "a", "temperature": "hot"}, "invalid_request", "temperature must be a number"),
    ({"prompt": "a", "max_tokens": 0}, "invalid_request", "max_tokens must be at least 1"),
    ({"prompt": "a", "n": True}, "invalid_request", "n must be an integer"),
    ({"prompt": "a", "stop": [1]}, "invalid_request", "stop must hold strings"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "invalid_request", "logit_bias"),
    ({"prompt": "a", "temprature": 1}, "invalid_request", "'temprature'"),
    ({"prompt": "a", "custom_id": [1]}, "invalid_request", "custom_id must be a text, got a list"),
    ({"prompt": "a", "reference": 1}, "invalid_request", "reference must be a text, got a number"),
    (
        {"prompt": "a", "metric": "bleu"},
        "invalid_request",
        "metric must be one of exact, rouge-l, qa-f1, match-all, got 'bleu'",
    ),
    ({"prompt": "a", "metric": "rouge-2"}, "invalid_request", "metric must be one of"),
    ({"prompt": "a", "metric": {}}, "invalid_request", "metric must be one of"),
    ({**batch(prompt="a"), "prompt": "b"}, "unknown_parameter", "unknown key 'prompt'"),
    ({**batch(prompt="a"), "custom_id": 3}, "invalid_request", "custom_id must be a text, got a number"),
    ({**batch(prompt="a"), "custom_id": ""}, "invalid_request", "custom_id must be a text that is not empty"),
    ({**batch(prompt="a"), "method": "GET"}, "invalid_request", "method must be POST, got 'GET'"),
    (
        batch("/v1/embeddings", prompt="a"),
        "invalid_url",
        "url must be /v1/chat/completions or /v1/completions",
    ),
    ({**batch(), "body": []}, "invalid_request", "body must be an object, got a list"),
    (batch(messages=[]), "invalid_request", "body needs prompt"),
    (batch(Endpoint.CHAT.value, prompt="a"), "invalid_request", "body needs messages"),
    (batch(prompt="a", model=1), "invalid_request", "model must be a text"),
    (batch(prompt=["a", "b"]), "invalid_request", "one prompt, got 2"),
    (batch(prompt="a", stream=True), "unsupported_parameter", "stream is not supported"),
    (batch(prompt="a", foo=1), "invalid_request", "'foo'"),
    (
        batch(Endpoint.CHAT.value, messages=[{"role": "user", "content": "a"}], tools=[{}]),
        "invalid_request",
        "tools",
    ),
    (
        batch(Endpoint.CHAT.value, messages=[{"role": "user", "content": "a"}], logprobs=3),
        "invalid_request",
        "logprobs must be true or false",
    ),
    (
        batch(Endpoint.CHAT.value, messages=[{"role": "user", "content": "a"}], top_logprobs=3),
        "invalid_request",
        "top_logprobs needs logprobs",
    ),
]


@pytest.mark.parametrize(("line", "code", "message"), BAD_LINES)
def test_bad_lines_say_what_is_wrong(line: Any, code: str, message: str) -> None:
    parsed = parse(line)
    assert isinstance(parsed, BadLine)
    assert parsed.error.code == code
    with pytest.raises(ValueError, match=message):
        raise parsed.error


def test_a_line_that_is_too_long_was_not_read() -> None:
    parsed = parse_line(RawLine(0, 1, None), {})
    assert isinstance(parsed, BadLine)
    assert parsed.error.code == "line_too_long"


def test_an_unreadable_line_is_answered_like_its_neighbours() -> None:
    flat, other = parse(b'{"prompt": "a'), parse(b'{"custom_id": "a", "url": "/v1/completions", "body": {')
    assert isinstance(flat, BadLine) and flat.endpoint is None
    assert isinstance(other, BadLine) and other.endpoint is not None


def test_a_bad_line_keeps_its_name() -> None:
    parsed = parse({"custom_id": "x", "prompt": ""})
    assert isinstance(parsed, BadLine)
    assert parsed.carried == {"custom_id": "x"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_KEYS = [
    "prompt",
    "messages",
    "body",
    "url",
    "method",
    "custom_id",
    "stop",
    "n",
    "logit_bias",
    "reference",
    "seed",
]


@settings(max_examples=10)
@given(line=st.dictionaries(st.sampled_from(_KEYS) | st.text(), _JSON, max_size=5) | _JSON)
def test_whatever_the_json_a_line_is_a_job_or_a_bad_line(line: Any) -> None:
    parse(line)


@given(
    body=st.dictionaries(st.sampled_from([*_KEYS, "tools", "stream", "logprobs", "model"]), _JSON, max_size=6)
)
def test_whatever_the_body_a_line_is_a_job_or_a_bad_line(body: dict[str, Any]) -> None:
    for url in (Endpoint.CHAT.value, Endpoint.COMPLETION.value):
        parse({**batch(url), "body": body})


def test_lines_say_on_whose_account_they_run_and_how_urgent_they_are() -> None:
    def read(line: Any) -> Job | BadLine:
        return parse_line(RawLine(4, 6, json.dumps(line).encode()), {}, accounts=True)

    flat = read({"prompt": "ab", "tenant": "gold", "priority": 3})
    assert isinstance(flat, Job) and (flat.tenant, flat.asked.priority) == ("gold", 3) and flat.carried == {}
    left_out = read({"prompt": "ab", "tenant": None, "priority": None})
    assert isinstance(left_out, Job) and (left_out.tenant, left_out.asked.priority) == (None, 0)
    openai = read(batch(prompt="ab", priority=3) | {"tenant": "gold"})
    assert isinstance(openai, Job) and (openai.tenant, openai.asked.priority) == ("gold", -3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tenant": 3}, "tenant must be a name, got a number"),
        ({"tenant": ""}, "tenant must be a name, got an empty one"),
        ({"priority": 1.5}, "priority must be an integer between -2147483647 and 2147483647, got 1.5"),
        ({"priority": True}, "priority must be an integer between -2147483647 and 2147483647, got True"),
        ({"priority": 10**30}, "priority must be an integer between -2147483647 and 2147483647, got 1000"),
    ],
)
def test_accounts_of_lines_are_checked(more: dict[str, Any], message: str) -> None:
    parsed = parse_line(RawLine(4, 6, json.dumps({"prompt": "ab", **more}).encode()), {}, accounts=True)
    assert isinstance(parsed, BadLine) and message in str(parsed.error)


@pytest.mark.parametrize("line", [{"prompt": "ab"}, batch(prompt="ab")])
def test_whose_line_it_is_may_be_none_of_the_callers_business(line: dict[str, Any]) -> None:
    parsed = parse_line(RawLine(4, 6, json.dumps(line | {"tenant": "gold"}).encode()), {})
    assert isinstance(parsed, BadLine) and "tenant" in str(parsed.error)
