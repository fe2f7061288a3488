"""Records as they stand in the output file, whole."""

import json
import math
from typing import Any

import pytest

from winnow.batch.lines import BadLine, Job, parse_line
from winnow.batch.reader import RawLine
from winnow.batch.records import Tally, answer_record, encode, error_record
from winnow.openai.answers import AnswerReader
from winnow.openai.errors import ApiError
from winnow.outputs import CompletionOutput, EvictionReport, RequestMetrics, RequestOutput
from winnow.sampling import Logprob

MESSAGES = [{"role": "user", "content": "Hi"}]
CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def parse(line: dict[str, Any] | bytes) -> Job | BadLine:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(RawLine(index=4, number=6, data=data), {})


def record(line: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    job = parse(line)
    assert isinstance(job, Job)
    shown = answer_record(job, output, "tiny", 1700000000, AnswerReader())
    assert json.loads(encode(shown)) == shown
    return shown


def bad_record(line: dict[str, Any] | bytes) -> dict[str, Any]:
    bad = parse(line)
    assert isinstance(bad, BadLine)
    return error_record(bad, bad.error)


def output(*texts: str, logprobs: bool = False) -> RequestOutput:
    answers = [
        CompletionOutput(index, text, [5, 6], finish_reason="length") for index, text in enumerate(texts)
    ]
    if logprobs:
        answers[0].cumulative_logprob = -1.5
        answers[0].logprobs = [
            {5: Logprob(-0.5, 1, "é")},
            {6: Logprob(-1.0, 2, "b"), 7: Logprob(-0.25, 1, "c"), 8: Logprob(-math.inf, 3, "d")},
        ]
    return RequestOutput("line-6", None, [1, 2, 3], answers, True, RequestMetrics(arrival_time=0.0))


def test_what_eviction_did_is_told() -> None:
    evicted = output("yes")
    evicted.outputs[0].eviction = EvictionReport("snapkv", 8, 20, ((8, 10), (9, 9)), 64, 128, 1, 0.5)
    assert "kept" not in record({"prompt": "Hi"}, evicted)["eviction"]
    assert record({"prompt": "Hi", "return_kept": True}, evicted)["eviction"] == {
        "policy": "snapkv",
        "kv_budget": 8,
        "num_tokens": 20,
        "kept": [[8, 10], [9, 9]],
        "bytes_held": 64,
        "bytes_freed": 128,
        "rounds": 1,
        "seconds": 0.5,
        "replay_tokens": 0,
        "replay_seconds": 0.0,
        "mean_kept": 9.0,
        "compression": 20 / 9,
        "kept_images": None,
        "kept_text": None,
        "checked_answers": 0,
        "equal_answers": 0,
    }


def test_flat() -> None:
    assert record({"custom_id": "x", "prompt": "Hi"}, output("yes")) == {
        "index": 4,
        "custom_id": "x",
        "text": "yes",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, **CACHED},
    }


def test_flat_with_several_samples_and_a_stop_reason() -> None:
    answer = output("a", "b")
    answer.outputs[1].finish_reason, answer.outputs[1].stop_reason = "stop", "END"
    assert record({"prompt": "Hi", "n": 2}, answer) == {
        "index": 4,
        "outputs": [
            {"index": 0, "text": "a", "token_ids": [5, 6], "finish_reason": "length"},
            {"index": 1, "text": "b", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "END"},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, **CACHED},
    }


def test_flat_logprobs() -> None:
    answer = output("éb", logprobs=True)
    answer.prompt_logprobs = [None, {2: Logprob(-0.1, 1, "t")}, {3: Logprob(-0.2, 1, "u")}]
    shown = record({"prompt": "Hi", "logprobs": 2, "prompt_logprobs": 0}, answer)
    assert shown["cumulative_logprob"] == -1.5
    second = [
        {"token_id": 7, "token": "c", "logprob": -0.25},
        {"token_id": 6, "token": "b", "logprob": -1.0},
        {"token_id": 8, "token": "d", "logprob": -9999.0},
    ]
    assert shown["logprobs"] == [
        {
            "token_id": 5,
            "token": "é",
            "logprob": -0.5,
            "top": [{"token_id": 5, "token": "é", "logprob": -0.5}],
        },
        {"token_id": 6, "token": "b", "logprob": -1.0, "top": second},
    ]
    assert [entry and entry["token_id"] for entry in shown["prompt_logprobs"]] == [None, 2, 3]


def test_what_is_not_finite_is_valid_json() -> None:
    answer = output("ab", logprobs=True)
    answer.outputs[0].cumulative_logprob = -math.inf
    assert answer.outputs[0].logprobs is not None
    answer.outputs[0].logprobs[0] = {5: Logprob(-math.inf, 1, "a"), 9: Logprob(math.nan, 2, "b")}
    shown = record({"prompt": "Hi", "logprobs": 2}, answer)
    assert shown["cumulative_logprob"] == -9999.0 - 1.0
    assert [entry["logprob"] for entry in shown["logprobs"][0]["top"]] == [-9999.0, -9999.0]
    assert json.loads(encode({"a": [math.inf, {"b": math.nan}], "c": 1.5})) == {
        "a": [None, {"b": None}],
        "c": 1.5,
    }


def test_flat_score() -> None:
    shown = record({"prompt": "Hi", "reference": "Yes", "category": "easy"}, output(" yes\n"))
    assert (shown["score"], shown["category"], shown["reference"]) == (1.0, "easy", "Yes")
    half = record({"prompt": "Hi", "reference": "a b", "metric": "rouge-l"}, output("a c"))
    assert half["score"] == 0.5


def test_batch_completion() -> None:
    line = {
        "custom_id": "x",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Hi", "model": "m"},
    }
    assert record(line, output("éb", logprobs=True)) == {
        "id": "batch_req_4",
        "custom_id": "x",
        "response": {
            "status_code": 200,
            "request_id": "line-6",
            "body": {
                "id": "cmpl-4",
                "object": "text_completion",
                "created": 1700000000,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "text": "éb",
                        "logprobs": {
                            "tokens": ["é", "b"],
                            "token_logprobs": [-0.5, -1.0],
                            "top_logprobs": [{"é": -0.5}, {"c": -0.25, "b": -1.0, "d": -9999.0}],
                            "text_offset": [0, 1],
                        },
                        "finish_reason": "length",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, **CACHED},
            },
        },
        "error": None,
    }


def test_what_a_batch_line_may_ask_besides() -> None:
    """As over HTTP: the prompt repeated, token ids and the prompt's logprobs."""
    answer = output("éb", logprobs=True)
    answer.prompt = "abc"
    answer.prompt_logprobs = [
        None,
        {2: Logprob(-0.5, 1, "b")},
        {3: Logprob(-math.inf, 9, "c"), 4: Logprob(-0.1, 1, "d")},
    ]
    asked = {"prompt": "abc", "logprobs": 1, "echo": True, "return_token_ids": True, "prompt_logprobs": 1}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": asked}
    [choice] = record(line, answer)["response"]["body"]["choices"]
    assert choice["text"] == "abcéb"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -9999.0, -0.5, -1.0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5, 6], [1, 2, 3])
    assert choice["prompt_logprobs"] == [
        None,
        {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {
            "3": {"logprob": -9999.0, "rank": 9, "decoded_token": "c"},
            "4": {"logprob": -0.1, "rank": 1, "decoded_token": "d"},
        },
    ]


def test_batch_chat() -> None:
    line = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}
    body = record(line, output("éb", logprobs=True))["response"]["body"]
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-4", "chat.completion", "tiny")
    [choice] = body["choices"]
    message = {"role": "assistant", "content": "éb", "refusal": None, "annotations": []}
    assert choice["message"] == message
    first, second = choice["logprobs"]["content"]
    token = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    assert first == {**token, "top_logprobs": [token]}
    assert [entry["token"] for entry in second["top_logprobs"]] == ["c", "b", "d"]
    plain = record(line, output("a", "b"))["response"]["body"]["choices"]
    assert [(choice["index"], choice["logprobs"]) for choice in plain] == [(0, None), (1, None)]


def test_errors() -> None:
    shown = {"line": 6, "code": "invalid_request", "message": "prompt must not be empty"}
    assert bad_record({"custom_id": "x", "prompt": ""}) == {"index": 4, "custom_id": "x", "error": shown}
    body = {
        "message": shown["message"],
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "invalid_request",
    }
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}}
    assert bad_record(line) == {
        "id": "batch_req_4",
        "custom_id": "x",
        "response": {"status_code": 400, "request_id": "line-6", "body": {"error": body}},
        "error": shown,
    }
    assert bad_record(b'{"url": "/v1/completions", "body"')["custom_id"] is None


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("invalid_request", "invalid_request_error", 400),
        ("context_length_exceeded", "invalid_request_error", 400),
        ("internal_error", "server_error", 500),
        ("request_failed", "server_error", 500),
    ],
)
def test_the_status_says_whose_fault_it_is(code: str, kind: str, status: int) -> None:
    job = parse({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}})
    response = error_record(job, ApiError(code, "why"))["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (status, kind)


@pytest.mark.parametrize("url", [None, "/v1/completions"])
def test_records_of_both_forms_are_counted(url: str | None) -> None:
    line: dict[str, Any] = {"prompt": "Hi"}
    if url is not None:
        line = {"custom_id": "x", "method": "POST", "url": url, "body": line}
    tally = Tally()
    tally.add(record({**line, "reference": "yes"}, output("yes")))
    tally.add(record({**line, "reference": "yes", "category": "hard"}, output("no", "yes")))
    tally.add(bad_record({**line, "reference": 3}))
    tally.add(bad_record({**line, "reference": "yes", "metric": "unheard of", "category": []}))
    assert (tally.requests, tally.failed, tally.prompt_tokens, tally.generated_tokens) == (4, 2, 6, 6)
    assert tally.scores == {"all": [1.0, 0.0], "hard": [0.0]}
