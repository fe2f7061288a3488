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


class CallGrammar:
    """Writer of grammars of one model's answers.

    Args:
        special_tokens: texts that are one token each, which other tokens cannot spell.
        field: of calls, in the response template.
        form: None: calls are a JSON list.
    """

    def __init__(
        self, special_tokens: Collection[str], field: Mapping[str, Any] | None, form: CallForm | None
    ) -> None:
        # A grammar names tokens in angle brackets.
        named = [each for each in special_tokens if re.fullmatch(r"<[^<>\s]+>", each)]
        named = [re.escape(each) for each in sorted(named, key=len, reverse=True)] or ["(?!)"]
        self._special = re.compile(f"({'|'.join(named)})")
        self._field, self._form = field, form

    def forced(self, calls: CallRule) -> StructuredOutputs:
        """Return the form of an answer that is calls. Raises InvalidRequestError: a schema is too large or too deep."""
        several = calls.several and (self._form is None or self._form.repeats)
        start = 'start: "[" calls "]"' if self._form is None else "start: calls"
        return StructuredOutputs(grammar="\n".join([start, *self._calls(calls.functions, several)]))

    def offered(self, functions: Sequence[Mapping[str, Any]], *, several: bool) -> list[str] | None:
        """Return rules of calls that may stand in a form's place, the first of them `calls`; None: none can say how one
        begins. Raises as `forced`.

        Calls that are not JSON between fixed texts begin with their opening mark, and anything follows.
        """
        if self._form is not None:
            return self._calls(functions, several and self._form.repeats)
        field = self._field or {}
        opening, _, _ = (mark_text(field, "open", "\0") or "").partition("\0")
        closing = mark_text(field, "close", "\0")
        if not opening:
            return None
        last = f" {self._spell(closing)}" if closing and self._special.fullmatch(closing) else ""
        return [f"calls: ({self._spell(opening)} rest{last}){{1,{MAX_CALLS}}}", f"rest: {_ANYTHING}"]

    def around(self, marks: ReasoningMarks | None, offered: Sequence[str] | None) -> str:
        """Return what stands before a form, or in its place, as `StructuredOutputs.before`.

        Reasoning between `marks` may be left out unless it has begun; `offered` are rules of calls in the form's place.
        """
        answer = "@form" if offered is None else "(@form | calls)"
        rules = list(offered or ())
        if marks is not None:
            end, is_token = self._spell(marks.closing), self._special.fullmatch(marks.closing)
            rules.append(
                f"thoughts: {_ANYTHING} {end}" if is_token else f"thoughts[suffix={end}]: {_ANYTHING}"
            )
            before = f'{self._spell(marks.opening) if marks.opening else ""} thoughts "\\n"? "\\n"?'
            answer = f"{before} {answer}" if not marks.opening else f"({before})? {answer}"
        return "\n".join([f"start: {answer}", *rules])

    def _calls(self, functions: Sequence[Mapping[str, Any]], several: bool) -> list[str]:
        comma = '", "' if self._form is None else '"\\n"?'
        more = f" ({comma} call){{0,{MAX_CALLS - 1}}}" if several else ""
        kinds = " | ".join(f"call_{number}" for number in range(len(functions)))
        rules = [f"calls: call{more}", f"call: {kinds}"]
        for number, function in enumerate(functions):
            schema = {"x-guidance": _JSON_OPTIONS, **(function.get("parameters") or _NO_PARAMETERS)}
            before, after = map(self._spell, self._around_arguments(function["name"]))
            rules.append(f"call_{number}: {before} args_{number} {after}")
            rules.append(f"args_{number}: %json {schema_text(schema)}")
        return rules

    def _around_arguments(self, name: str) -> tuple[str, str]:
        before, after = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"
        if self._form is None:
            return before, after
        opening, closing = (mark_text(self._form.field, side, name) or "" for side in ("open", "close"))
        if self._form.named_outside:
            return opening, closing
        return f"{opening}\n{before}", f"{after}\n{closing}"

    def _spell(self, text: str) -> str:
        """Return a text as the grammar takes it: special tokens by name, the rest as strings."""
        parts = enumerate(self._special.split(text))
        words = (part if index % 2 else json.dumps(part, ensure_ascii=False) for index, part in parts)
        return " ".join(word for word in words if word != '""') or '""'
