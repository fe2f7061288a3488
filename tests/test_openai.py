"""The forms of the OpenAI API by themselves, as a server would use them."""

from typing import Any

import pytest

from winnow.batch.lines import read_batch_line
from winnow.errors import CapacityError, ContextLengthError, InvalidRequestError
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import FAILED, INTERNAL, ApiError
from winnow.openai.request import CompletionRequest, Endpoint, read_body
from winnow.openai.response import ChunkStream, ResponseForm, completion_object, event, fold
from winnow.outputs import CompletionOutput, RequestMetrics, RequestOutput
from winnow.sampling import Logprob, SamplingParams

MESSAGES = [{"role": "user", "content": "Hi"}]


def form_of(endpoint: Endpoint, **switches: bool) -> ResponseForm:
    messages = MESSAGES if endpoint is Endpoint.CHAT else None
    asked = CompletionRequest((), messages, SamplingParams(), None, **switches)  # type: ignore[arg-type]
    return ResponseForm(asked, AnswerReader(), "7", "m", 9)


def output(*texts: str) -> RequestOutput:
    answers = [
        CompletionOutput(index, text, [5, 6], finish_reason="stop") for index, text in enumerate(texts)
    ]
    return RequestOutput("r", None, [1, 2, 3], answers, True, RequestMetrics(arrival_time=0.0))


def test_bodies_are_read_over_the_defaults() -> None:
    chat = read_body(Endpoint.CHAT, {"messages": MESSAGES, "model": "m", "top_p": 0.5}, {"temperature": 0.0})
    assert (chat.messages, chat.prompt, chat.model) == (MESSAGES, None, "m")
    # A chat continues until it is done, a completion for OpenAI's 16 tokens.
    assert (chat.params.max_tokens, chat.params.top_p, chat.params.temperature) == (None, 0.5, 0.0)
    completion = read_body(Endpoint.COMPLETION, {"prompt": [[1, 2]]}, {})
    assert (completion.prompt, completion.messages, completion.params.max_tokens) == ([1, 2], None, 16)


@pytest.mark.parametrize(
    ("endpoint", "body", "message"),
    [
        (Endpoint.CHAT, [], "body must be an object, got a list"),
        (Endpoint.CHAT, {"prompt": "Hi"}, "body needs messages for /v1/chat/completions"),
        (Endpoint.COMPLETION, {"prompt": ["a", "b"]}, "a request must hold one prompt, got 2"),
        (Endpoint.COMPLETION, {"prompt": "a", "n": 0}, "n must be at least 1, got 0"),
        (Endpoint.CHAT, {"messages": MESSAGES, "tools": [1]}, r"tools\[0\] must be a function"),
    ],
)
def test_bodies_are_refused_by_field_and_value(endpoint: Endpoint, body: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        read_body(endpoint, body, {})
    assert refused.value.status == 400


def test_objects_answer_in_the_endpoints_form() -> None:
    chat = completion_object(form_of(Endpoint.CHAT), [output("a", "b")])
    assert list(chat) == ["id", "object", "created", "model", "choices", "usage"]
    assert (chat["id"], chat["object"], chat["created"]) == ("chatcmpl-7", "chat.completion", 9)
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["a", "b"]
    assert chat["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    text = completion_object(form_of(Endpoint.COMPLETION), [output("a")])
    assert (text["id"], text["object"], text["choices"][0]["text"]) == ("cmpl-7", "text_completion", "a")


@pytest.mark.parametrize(
    ("error", "code", "status", "kind"),
    [
        (ContextLengthError("long"), "context_length_exceeded", 400, "invalid_request_error"),
        (CapacityError("big"), "kv_memory_exceeded", 400, "invalid_request_error"),
        (InvalidRequestError("bad"), "invalid_request", 400, "invalid_request_error"),
        (ApiError(FAILED, "broken"), FAILED, 500, "server_error"),
        (RuntimeError("fault"), INTERNAL, 500, "server_error"),
    ],
)
def test_errors_have_code_status_and_type(error: Exception, code: str, status: int, kind: str) -> None:
    wrapped = ApiError.wrap(error)
    assert (wrapped.code, wrapped.status) == (code, status)
    described = wrapped.body()["error"]
    assert (described["code"], described["type"], described["param"]) == (code, kind, None)


def test_lines_of_a_batch() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    assert read_batch_line(line, {}).prompt == "Hi"
    for change, message in (({"url": "/v1/x"}, "url must be"), ({"method": "GET"}, "method must be POST")):
        with pytest.raises(ApiError, match=message):
            read_batch_line(line | change, {})


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage": True}]
)
@pytest.mark.parametrize("token_ids", [False, True])
def test_events_are_chunks_written_out(endpoint: Endpoint, options: dict[str, bool], token_ids: bool) -> None:
    """The short way that most deltas take writes what the long way writes."""
    logprobs: Any = [{7: Logprob(-0.5, 1, "a")}]
    answers = [
        CompletionOutput(0, "", []),
        *(CompletionOutput(0, text, [7]) for text in ('"a"\n', "\u00e9\U0001f600\u2028", "", "\x00\x7f\\")),
        CompletionOutput(0, "b", [7, 7], logprobs=logprobs * 2),
        CompletionOutput(0, "c", [7], finish_reason="stop", stop_reason=7),
        CompletionOutput(0, "c", [7], finish_reason="stop"),
    ]
    form = form_of(endpoint, return_token_ids=token_ids, **options)
    short, long = ChunkStream(form), ChunkStream(form)
    for answer in answers:
        output = RequestOutput("r", "p", [1, 2], [answer], False, RequestMetrics(arrival_time=0.0))
        assert short.events(0, output) == "".join(map(event, long.push(0, output)))
    assert short.usage() == long.usage()


@pytest.mark.parametrize("endpoint", Endpoint)
def test_a_whole_answer_is_the_fold_of_its_deltas(endpoint: Endpoint) -> None:
    """However the text was cut: logprobs, token ids and offsets in the text with it."""

    def delta(text: str, end: str | None = None) -> CompletionOutput:
        logprobs: Any = [{7: Logprob(-0.5, 1, each)} for each in text]
        return CompletionOutput(0, text, [7] * len(text), logprobs=logprobs, finish_reason=end)

    def output(answer: CompletionOutput) -> RequestOutput:
        return RequestOutput("r", "p", [1, 2], [answer], False, RequestMetrics(arrival_time=0.0))

    form = form_of(endpoint, return_token_ids=True)
    whole = completion_object(form, [output(delta("abcd\u00e9f", "length"))])
    for parts in (("a", "bc", "d\u00e9f"), ("abcd", "", "\u00e9f"), ("", "abcd\u00e9f", "")):
        chunks = ChunkStream(form)
        deltas = [output(delta(part, "length" if n == 2 else None)) for n, part in enumerate(parts)]
        assert fold(chunk for each in deltas for chunk in chunks.push(0, each)) == whole["choices"]
        assert chunks.usage() == whole["usage"]
    [choice] = whole["choices"]
    assert choice["token_ids"] == [7] * 6 and choice["prompt_token_ids"] == [1, 2]
    if endpoint is Endpoint.COMPLETION:
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
