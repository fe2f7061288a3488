"""/openapi.json says what is read: its fields and limits are those of the readers."""

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.server.running import Running

from winnow.openai.errors import ApiError
from winnow.openai.request import Endpoint, read_body
from winnow.sampling import SamplingParams
from winnow.sampling.params import READERS
from winnow.server.forms import FORMS

SAMPLE: dict[str, Any] = {
    "model": "m", "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": 1.0}, "seed": 1, "stop": ["a"],
    "stop_token_ids": [5], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1,
    "prompt_logprobs": 1, "skip_special_tokens": False, "detokenize": True, "stream": True,
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"},
    "structured_outputs": {"regex": "a"}, "priority": 1, "return_token_ids": True, "return_kept": True,
    "eviction": "snapkv", "reuse": "documents", "compression": 2.0, "kv_budget": 5, "context_tokens": 5,
    "template_tail": 1,
    "answer_prefix": 1, "protect": [[0, 1]], "earlier_rounds": [[5, 3]],
    "forced_tokens": [5], "bad_words": ["x"],
    "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
    "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "session_id": "s",
    "session_memory": "1MiB", "release": True, "max_tokens": 5, "logprobs": 1, "echo": True,
    "max_completion_tokens": 5, "top_logprobs": 1, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True,
    "continue_final_message": True, "documents": [{"text": "a"}],
}  # fmt: skip
ALONE = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "session_memory": {"session_id": "s"}, "release": {"session_id": "s"},
}  # fmt: skip


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_field_is_read(endpoint: Endpoint) -> None:
    chat, form = endpoint is Endpoint.CHAT, FORMS[endpoint.value]
    question = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    for name in form.model_fields:
        if name in question:
            continue
        value = True if chat and name == "logprobs" else SAMPLE[name]
        body = {**question, name: value, **ALONE.get(name, {})}
        form.model_validate(body)
        read_body(endpoint, body, {}, served=True)
        if name == "eviction":  # a policy's name is the engine's to know: what is asked reaches it
            assert read_body(endpoint, body, {}, served=True).params.eviction == value
            continue
        with pytest.raises(ApiError):
            read_body(endpoint, {**question, name: object()}, {}, served=True)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_parameter_is_described_with_its_limits(endpoint: Endpoint) -> None:
    schema = FORMS[endpoint.value].model_json_schema()["properties"]
    names = {each.name for each in fields(SamplingParams)} - {
        *READERS,
        "output_kind",
    }  # which requests cannot set
    assert names <= schema.keys()
    assert all(schema[name].get("description") for name in names.difference(OWN))

    def kinds(name: str) -> list[dict[str, Any]]:
        return [each for each in schema[name]["anyOf"] if each != {"type": "null"}]

    assert kinds("temperature") == [{"type": "number", "minimum": 0, "maximum": 100.0}]
    assert kinds("top_p") == [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}]
    assert kinds("min_tokens") == [{"type": "integer", "minimum": 0, "maximum": 2**31 - 1}]
    ratio = {"type": "number", "minimum": 1, "maximum": 1e6}
    assert kinds("compression") == [ratio, {"type": "string"}, {"type": "array", "items": ratio}]
    assert kinds("stop_token_ids")[0]["maxItems"] == 1024
    assert schema["seed"]["description"].startswith("same seed, same prompt, same answer")


OWN = ("max_tokens", "logprobs", "structured_outputs")
"""Described by the form itself, or by other forms in it."""


def test_every_route_is_described(server: Running) -> None:
    found = server.client.get("/openapi.json").json()
    for path in FORMS:
        [content] = found["paths"][path]["post"]["requestBody"]["content"].values()
        assert content["schema"]["type"] == "object" and "$ref" not in str(content)
    assert {"/health", "/metrics", "/v1/models", "/v1/files/{name}/content", "/load"} <= set(found["paths"])
