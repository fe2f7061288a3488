"""Forms of answers: a JSON schema, a regular expression, a choice or a grammar."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from winnow.errors import InvalidRequestError
from winnow.sampling.list_params import require
from winnow.values.checks import check_length, check_list, show
from winnow.values.foreign_names import accept_fields
from winnow.vllm import names as vllm_names

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 16 * 1024
MAX_CHOICES = 1024

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = ("const", "enum")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@accept_fields(vllm_names.STRUCTURED, InvalidRequestError, "field of structured_outputs")
@dataclass(frozen=True)
class StructuredOutputs:
    """The form of an answer; exactly one of the fields is given. Names as in vLLM.

    Attributes:
        json: a JSON schema, as an object or as JSON text; stored as JSON text.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in Lark's syntax, as llguidance reads it, or in llama.cpp's (`root ::= ...`).
        json_object: any JSON object.
        before: rules of what stands before the form, in Lark's syntax, where the form is `@form`; readers of answers
            set it for reasoning.

    Raises:
        InvalidRequestError: none or several are given, or one is of the wrong type or too large.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    before: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must hold exactly one of {', '.join(_KINDS)}, got {', '.join(given) or 'none'}"
            )
        require(self.json_object in (None, True, False), "json_object", "true or false", self.json_object)
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        _check_text("regex", self.regex, MAX_REGEX_CHARS)
        _check_text("grammar", self.grammar, MAX_GRAMMAR_CHARS)

    @classmethod
    def from_mapping(cls, values: Any) -> Self:
        """Read an object of JSON. Raises InvalidRequestError: no object, or an unknown field or a bad value in it."""
        require(isinstance(values, Mapping), "structured_outputs", "an object", values)
        if "before" in values:
            raise InvalidRequestError(
                f"'before' is not a field of structured_outputs; known: {', '.join(_KINDS)}"
            )
        return cls(**values)


StructuredOutputsParams = GuidedDecodingParams = StructuredOutputs
"""vLLM's names, the present one and the earlier one."""


def schema_text(schema: Any) -> str:
    """Return a JSON schema as JSON text. Raises InvalidRequestError: it is none, too large or too deep."""
    if isinstance(schema, str):
        _check_text("json", schema, MAX_GRAMMAR_CHARS)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"json must be a JSON schema, got unreadable JSON: {error}") from None
    require(isinstance(schema, Mapping | bool), "json", "a JSON schema, an object", schema)
    _check_values(schema)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json must be a JSON schema: {error}") from None
    _check_text("json", text, MAX_GRAMMAR_CHARS)
    return text


def _check_values(schema: Any) -> None:
    """Refuse what nests deeper than `MAX_SCHEMA_DEPTH`, and numbers that the grammar would replace by others."""
    level, depth = [] if isinstance(schema, bool) else [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(f"json must nest at most {MAX_SCHEMA_DEPTH} levels deep")
        for each in level:
            if isinstance(each, Mapping):
                for name in (*_BOUNDS, *_VALUES):
                    _check_number(name, each.get(name))
        children = [
            child for each in level for child in (each.values() if isinstance(each, Mapping) else each)
        ]
        level = [child for child in children if isinstance(child, Mapping | list | tuple)]


def _check_number(name: str, value: Any) -> None:
    """Refuse numbers that llguidance replaces in silence: it holds them in float64, bounds of integers in int64."""
    if name in _VALUES and isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_number(name, each)
    if type(value) not in (int, float) or (name in _VALUES and isinstance(value, float)):
        return
    largest = value == 2**63 - 1 and name != "exclusiveMaximum"  # what float64 rounds up is cut to it
    if abs(value) >= 2**63 or (value != float(value) and not largest):
        raise InvalidRequestError(
            f"{name} of a JSON schema must be above -2^63, below 2^63 and whole in float64, got {value}"
        )


def _choices(choice: Any) -> tuple[str, ...]:
    check_list("choice", choice, "a list of texts", InvalidRequestError)
    check_length("choice", choice, MAX_CHOICES, InvalidRequestError)
    if not choice:
        raise InvalidRequestError("choice must hold at least 1 text, got none")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"choice must hold texts that are not empty, got {show(text)}")
    if (length := sum(map(len, choice))) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"choice must hold at most {MAX_GRAMMAR_CHARS} characters, got {length}")
    return tuple(choice)


def _check_text(name: str, text: Any, most: int) -> None:
    if text is None:
        return
    require(isinstance(text, str) and bool(text), name, "a text that is not empty", text)
    if len(text) > most:
        raise InvalidRequestError(f"{name} must have at most {most} characters, got {len(text)}")
