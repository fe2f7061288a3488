"""Tool calls in grammars of answers: calls that a request demands, calls in a form's place, reasoning before both.

Where the model's own form is JSON between fixed texts, calls are written in it; else as a JSON list. The arguments of
each follow its function's schema.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.openai.regions import NAME_GROUP, mark_pattern, mark_text
from winnow.openai.tools import CallRule
from winnow.sampling.params import ReasoningMarks
from winnow.sampling.structured import StructuredOutputs, schema_text

MAX_CALLS = 32
"""Most calls of an answer: a model without much sense would call forever."""

_ANYTHING = "/(?s:.*)/"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# As json.dumps writes it, which models have seen in calls; where white space is free, some write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class CallForm:
    """The texts around a call's JSON.

    Attributes:
        field: of the response template.
        named_outside: the JSON is the arguments alone, for the name stands before.
        repeats: an answer may hold several.
    """

    field: Mapping[str, Any]
    named_outside: bool
    repeats: bool

    @classmethod
    def of(cls, template: Mapping[str, Any] | None) -> "CallForm | None":
        """Return the form of a response template's calls; None: it has none, or it is not JSON between fixed texts."""
        field = {} if template is None else template["fields"].get("tool_calls", {})
        texts = mark_text(field, "open", "x"), mark_text(field, "close", "x")
        if field.get("content") != "json" or field.get("content_args") or None in texts:
            return None
        outside = bool(NAME_GROUP.search(mark_pattern(field, "open") or ""))
        function: Any = {"name": "{name}", "arguments": "{content}"} if outside else "{content}"
        if field.get("transform") != {"type": "function", "function": function}:
            return None
        return cls(field, outside, bool(field.get("repeats")))


def forced_form(calls: CallRule, form: CallForm | None, special_tokens: Collection[str]) -> StructuredOutputs:
    """Return the form of an answer that is calls. Raises InvalidRequestError: the functions' schemas are too large, or
    nest too deeply.

    Args:
        form: None: a JSON list.
        special_tokens: texts that are one token each, which other tokens cannot spell.
    """
    several = calls.several and (form is None or form.repeats)
    rules = _call_rules(calls.functions, form, special_tokens, several)
    start = 'start: "[" calls "]"' if form is None else "start: calls"
    return StructuredOutputs(grammar="\n".join([start, *rules]))


def offered_calls(
    functions: Sequence[Mapping[str, Any]],
    field: Mapping[str, Any],
    form: CallForm | None,
    special_tokens: Collection[str],
    *,
    several: bool,
) -> list[str] | None:
    """Return rules of calls that may stand in a form's place, the first of them `calls`.

    Calls that are not JSON between fixed texts begin with their opening mark, and anything follows. Raises
    InvalidRequestError: as `forced_form`.

    Args:
        field: of the response template.

    Returns:
        None: no rule can say how a call begins.
    """
    if form is not None:
        return _call_rules(functions, form, special_tokens, several and form.repeats)
    opening, _, _ = (mark_text(field, "open", "\0") or "").partition("\0")
    closing, words = mark_text(field, "close", "\0"), _Words(special_tokens)
    if not opening:
        return None
    last = f" {words.spell(closing)}" if closing and words.is_special(closing) else ""
    return [f"calls: ({words.spell(opening)} rest{last}){{1,{MAX_CALLS}}}", f"rest: {_ANYTHING}"]


def _call_rules(
    functions: Sequence[Mapping[str, Any]],
    form: CallForm | None,
    special_tokens: Collection[str],
    several: bool,
) -> list[str]:
    words = _Words(special_tokens)
    comma = '", "' if form is None else '"\\n"?'
    more = f" ({comma} call){{0,{MAX_CALLS - 1}}}" if several else ""
    rules = [
        f"calls: call{more}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}",
    ]
    for number, function in enumerate(functions):
        schema = {"x-guidance": _JSON_OPTIONS, **(function.get("parameters") or _NO_PARAMETERS)}
        before, after = _around_arguments(function["name"], form)
        rules.append(f"call_{number}: {words.spell(before)} args_{number} {words.spell(after)}")
        rules.append(f"args_{number}: %json {schema_text(schema)}")
    return rules


def rules_around(
    marks: ReasoningMarks | None, offered: Sequence[str] | None, special_tokens: Collection[str]
) -> str:
    """Return what stands before a form, or in its place, as `StructuredOutputs.before`.

    Args:
        marks: of reasoning before it, which may be left out unless it has begun; None: there is none.
        offered: rules of calls that may stand in its place; None: none may.
        special_tokens: texts that are one token each, which other tokens cannot spell.
    """
    answer = "@form" if offered is None else "(@form | calls)"
    rules = list(offered or ())
    if marks is not None:
        words = _Words(special_tokens)
        end = words.spell(marks.closing)
        rules.append(
            f"thoughts: {_ANYTHING} {end}"
            if words.is_special(marks.closing)
            else f"thoughts[suffix={end}]: {_ANYTHING}"
        )
        before = f'{words.spell(marks.opening) if marks.opening else ""} thoughts "\\n"? "\\n"?'
        answer = f"{before} {answer}" if not marks.opening else f"({before})? {answer}"
    return "\n".join([f"start: {answer}", *rules])


def _around_arguments(name: str, form: CallForm | None) -> tuple[str, str]:
    before, after = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"
    if form is None:
        return before, after
    opening, closing = (mark_text(form.field, side, name) or "" for side in ("open", "close"))
    return (opening, closing) if form.named_outside else (f"{opening}\n{before}", f"{after}\n{closing}")


class _Words:
    """Writer of texts as the grammar takes them: special tokens by name, the rest as strings."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        named = [
            re.escape(each) for each in sorted(special_tokens, key=len, reverse=True) if _can_be_named(each)
        ]
        self._special = re.compile(f"({'|'.join(named)})") if named else None

    def is_special(self, text: str) -> bool:
        """Return whether a text is one special token."""
        return self._special is not None and self._special.fullmatch(text) is not None

    def spell(self, text: str) -> str:
        """Return a text."""
        parts = [text] if self._special is None else self._special.split(text)
        words = (
            part if index % 2 else json.dumps(part, ensure_ascii=False) for index, part in enumerate(parts)
        )
        return " ".join(word for word in words if word != '""') or '""'


def _can_be_named(token: str) -> bool:
    """Return whether a grammar can name a token: it does so in angle brackets."""
    return re.fullmatch(r"<[^<>\s]+>", token) is not None
