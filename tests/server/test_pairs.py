"""Fields that are right alone are right together, or refused by name: every pair of the forms' fields, asked once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
from tests.server.running import Running, running
from tests.server.test_openapi import ALONE, SAMPLE

from winnow import LLM
from winnow.server.forms import FORMS

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "description": "d"}
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    ANTHROPIC: {"model": "m", "messages": MESSAGES, "max_tokens": 2},
}
# Values that ask for something where a form's own sample does not.
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {
        **{"logprobs": True, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        **{"min_tokens": 3, "protect": [[0, 1]], "structured_outputs": {"choice": ["x"]}, "n": 2},
        **{"continue_final_message": False, "add_generation_prompt": False},
        **{"eviction": "winnow-keys", "response_format": {"type": "json_object"}, "compression": 2.0},
    },
    RESPONSES: {
        **{
            "instructions": "Be brief",
            "previous_response_id": None,
            "conversation": "c",
            "truncation": "disabled",
        },
        **{"text": {"format": {"type": "json_object"}}, "store": True},
        **{"tools": [{"type": "function", **TOOL}], "tool_choice": "required", "parallel_tool_calls": False},
        **{"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
    },
    ANTHROPIC: {
        **{
            "system": "Be brief",
            "tools": [{**TOOL, "input_schema": {"type": "object"}}],
            "stop_sequences": ["x"],
        },
        **{
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        },
        **{
            "output_config": {"effort": "low"},
            "context_management": {"edits": []},
            "metadata": {"user_id": "u"},
        },
        **{"cache_control": {"type": "ephemeral"}},
    },
}


@pytest.fixture(scope="module")
def asked(llm: LLM) -> Iterator[Running]:
    with running(llm) as server:
        yield server


def fields_of(path: str) -> dict[str, dict[str, Any]]:
    """What each field of a path's form is asked with."""
    own = ASKED[path]
    names = [name for name in FORMS[path].model_fields if name not in BASE[path]]
    found = {name: own.get(name, SAMPLE.get(name)) for name in names}
    return {name: {name: value, **ALONE.get(name, {})} for name, value in found.items() if value is not None}


def faults(server: Running, path: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The bodies that are answered by neither an answer nor a refusal that says why."""

    def ask(body: dict[str, Any]) -> str | None:
        response = server.post(path, {**BASE[path], **body})
        refused = response.status_code == 400 and len(response.json()["error"]["message"]) > 10
        fine = response.status_code == 200 and not any(
            f'"{each}"' in response.text for each in ("internal_error", "request_failed")
        )
        return None if fine or refused else f"{body}: {response.status_code} {response.text[-300:]}"

    with ThreadPoolExecutor(8) as pool:
        return [each for each in pool.map(ask, bodies) if each is not None]


@pytest.mark.parametrize("path", BASE)
def test_every_pair_of_fields(asked: Running, path: str) -> None:
    pairs = [{**a, **b} for a, b in combinations(fields_of(path).values(), 2)]
    assert len(pairs) > 50 and faults(asked, path, pairs) == []


@pytest.mark.parametrize("path", BASE)
def test_every_field_as_nothing(asked: Running, path: str) -> None:
    """Null is the field left out; an empty text is that, or refused."""
    names = list(fields_of(path))
    assert all(
        asked.post(path, {**BASE[path], name: None, "stream": False}).status_code == 200 for name in names
    )
    assert faults(asked, path, [{name: ""} for name in names]) == []
