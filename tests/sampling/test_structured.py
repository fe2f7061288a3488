"""Answers that keep to a form, through the public API."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.errors import InvalidRequestError
from winnow.sampling.structured import StructuredOutputs

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_memory="32MiB", max_num_seqs=8) as llm:
        yield llm


def answers(llm: LLM, form: Any, n: int = 4, **options: Any) -> list[Any]:
    params = SamplingParams(n=n, seed=5, max_tokens=200, structured_outputs=form, **options)
    [output] = llm.generate(["Once upon a time"], params)
    output.raise_for_error()
    assert [each.finish_reason for each in output.outputs] == ["stop"] * n
    return [each.text for each in output.outputs]


def test_json_schema(llm: LLM) -> None:
    for text in answers(llm, {"json": SCHEMA}):
        value = json.loads(text)
        assert set(value) == {"name", "age"} and type(value["age"]) is int and len(value["name"]) <= 8


def test_regex_choice_and_grammar(llm: LLM) -> None:
    assert all(
        re.fullmatch(r"[0-9]{3}-[a-f]{2}", text) for text in answers(llm, {"regex": "[0-9]{3}-[a-f]{2}"})
    )
    assert set(answers(llm, {"choice": ['yes "é"', "no"]}, n=8)) <= {'yes "é"', "no"}
    grammar = 'start: "(" item ("," item)? ")"\nitem: /[a-z]{1,3}/ | "<" /[0-9]/ ">"'
    for text in answers(llm, {"grammar": grammar}):
        assert re.fullmatch(r"\(([a-z]{1,3}|<\d>)(,([a-z]{1,3}|<\d>))?\)", text)


def test_greedy_and_mixed_batches(llm: LLM) -> None:
    """A form binds its own request alone, also beside others, and greedy ones."""
    free = SamplingParams(temperature=0, max_tokens=12)
    bound = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"choice": ["Ada", "Bob"]})
    [alone] = llm.generate(["The name is"], free)
    beside, formed = llm.generate(["The name is"] * 2, [free, bound])
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    assert formed.outputs[0].text in ("Ada", "Bob")


def test_preemption_keeps_the_form() -> None:
    """A sequence that comes back continues where its form was."""
    form = StructuredOutputs(regex="([a-z]{4} ){30}end")
    with LLM(kv_memory="3MiB", max_num_seqs=8, max_model_len=512) as small:
        params = SamplingParams(seed=1, max_tokens=300, structured_outputs=form)
        outputs = small.generate([f"Story number {index}" for index in range(8)], params)
        assert small.stats().num_preemptions > 0, "the cache is large enough for all"
    for output in outputs:
        assert re.fullmatch("([a-z]{4} ){30}end", output.outputs[0].text)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"jsn": {}}, "unknown field of structured_outputs .*did you mean json"),
        ({"regex": ""}, "not empty"),
        ({"regex": 3}, "must be a text"),
        ({"regex": "a" * 20_000}, "at most"),
        ({"choice": []}, "at least 1"),
        ({"choice": ["a"] * 2000}, "at most"),
        ({"choice": [1]}, "texts"),
        ({"json": 5}, "JSON schema"),
        ({"json": "{"}, "unreadable"),
        ({"json_object": "yes"}, "true or false"),
        # What llguidance would replace by another number, or not survive.
        (
            {"json": {"properties": {"a": {"maximum": 2**63 + 5}}}},
            "maximum of a JSON schema .*9223372036854775813",
        ),
        ({"json": {"maximum": 1e19}}, "below 2.63"),
        ({"json": '{"type": "integer", "minimum": 9007199254740993}'}, "whole in float64"),
        ({"json": {"exclusiveMaximum": 2**63 - 1}}, "exclusiveMaximum"),
        ({"json": {"anyOf": [{"const": {"a": [-(2**63)]}}]}}, "const of a JSON schema"),
        ({"json": {"enum": [1, 2**64]}}, "enum of a JSON schema"),
    ],
)
def test_forms_are_checked(form: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(structured_outputs=form)


def test_bounds_that_hold(llm: LLM) -> None:
    for bounds in ({"minimum": 2**53, "maximum": 2**53}, {"minimum": 2**63 - 1, "maximum": 2**63 - 1}):
        form = {"json": {"type": "integer", **bounds}}
        [output] = llm.generate("Number", SamplingParams(structured_outputs=form, max_tokens=40))
        assert int(output.outputs[0].text) == bounds["minimum"]


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="nest at most"):
        SamplingParams(structured_outputs={"json": schema})


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "["},
        {"regex": "(?=a)b"},
        {"regex": "(" * 500 + "a" + ")" * 500},
        {"grammar": "start: undefined_rule"},
        {"json": {"type": "no such type"}},
        {"json": {"$ref": "http://example.com/schema.json"}},
        {"json": {"type": "string", "pattern": "("}},
    ],
)
def test_what_cannot_be_compiled_is_refused_before_the_engine(llm: LLM, form: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        llm.generate(["a"], SamplingParams(structured_outputs=form))
    assert llm.generate(["a"], SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "((a{1,500}){1,500}){1,500}b"},
        {"regex": "(a|b|ab)*c" * 200},
        {"json": {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": f"(a|b){{0,{i}}}c"}
         for i in range(100)}, "required": [f"k{j}"]} for j in range(20)]}},
        {"grammar": "start: a a a a\na: b | b b | b b b\nb: a | /x?/"},
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_bombs_harm_no_other(llm: LLM, form: Any) -> None:
    """Compiled or refused, answered or failed: soon, and the engine continues."""
    params = SamplingParams(max_tokens=20, structured_outputs=form)
    try:
        [output] = llm.generate(["a"], params)
        assert output.finished
    except InvalidRequestError:
        pass
    assert llm.generate(["a"], SamplingParams(max_tokens=1))[0].finished


def test_what_does_not_go_together() -> None:
    for options in ({"ignore_eos": True}, {"forced_tokens": [1]}):
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            SamplingParams(structured_outputs={"regex": "a"}, **options)
