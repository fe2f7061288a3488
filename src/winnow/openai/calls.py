"""Tool calls that a request demands: the grammar of an answer that is nothing but calls.

Where the model's own form is JSON between fixed texts, calls are written in it; else as a JSON list. The arguments of
each follow its function's schema.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from winnow.openai.tools import ForcedCalls
from winnow.sampling.structured import StructuredOutputs, schema_text

MAX_CALLS = 32
"""Most calls of an answer: a model without much sense would call forever."""

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# As json.dumps writes it, which models have seen in calls; where white space is free, some write nothing else.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A named group up to its end: character classes and escapes hold parentheses that end nothing.
_NAME_GROUP = re.compile(r"\(\?P<name>(?:\[[^\]]*\]|\\.|[^()\\])*\)")
_OPTIONAL_SPACE = re.compile(r"\\s[*?]")


@dataclass(frozen=True)
class CallForm:
    """The texts around a call's JSON.

    Attributes:
        opening: what stands before it, a regular expression of fixed text; its group `name` is the function's name.
        closing: what stands behind it, likewise.
        named_outside: the JSON is the arguments alone, for the name stands before.
        repeats: an answer may hold several.
    """

    opening: str
    closing: str
    named_outside: bool
    repeats: bool

    @classmethod
    def of(cls, template: Mapping[str, Any] | None) -> "CallForm | None":
        """The form of a response template's calls; None: there is none, or it is not JSON between fixed texts."""
        field = {} if template is None else template["fields"].get("tool_calls", {})
        opening, closing = _delimiter(field, "open"), _delimiter(field, "close")
        if field.get("content") != "json" or field.get("content_args") or None in (opening, closing):
            return None
        assert opening is not None and closing is not None
        outside = bool(_NAME_GROUP.search(opening))
        function: Any = {"name": "{name}", "arguments": "{content}"} if outside else "{content}"
        if field.get("transform") != {"type": "function", "function": function}:
            return None
        form = cls(opening, closing, outside, bool(field.get("repeats")))
        return None if None in (_literal(opening, "x"), _literal(closing, "x")) else form


@dataclass(frozen=True)
class Reasoning:
    """What may stand before the calls.

    Attributes:
        opening, closing: the marks around it.
        begun: the prompt ends within it.
    """

    opening: str
    closing: str
    begun: bool


def forced_form(
    forced: ForcedCalls, form: CallForm | None, reasoning: Reasoning | None, special_tokens: Collection[str]
) -> StructuredOutputs:
    """The form of an answer that is calls.

    Args:
        form: None: a JSON list.
        special_tokens: texts that are one token each, which other tokens cannot spell.

    Raises:
        InvalidRequestError: the functions' schemas are too large, or nest too deeply.
    """
    words = _Words(special_tokens)
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(forced.functions)))}"]
    for number, function in enumerate(forced.functions):
        schema = {"x-guidance": _JSON_OPTIONS, **(function.get("parameters") or _NO_PARAMETERS)}
        before, after = _around_arguments(function["name"], form)
        rules.append(f"call_{number}: {words.spell(before)} args_{number} {words.spell(after)}")
        rules.append(f"args_{number}: %json {schema_text(schema)}")
    comma = '", "' if form is None else '"\\n"?'
    several = forced.several and (form is None or form.repeats)
    calls = f"call ({comma} call){{0,{MAX_CALLS - 1}}}" if several else "call"
    if form is None:
        calls = f'"[" {calls} "]"'
    thoughts = ""
    if reasoning is not None:
        closing = words.spell(reasoning.closing)
        special = words.is_special(reasoning.closing)
        rules.append(
            f"thoughts: /(?s:.*)/ {closing}" if special else f"thoughts[suffix={closing}]: /(?s:.*)/"
        )
        begun = "thoughts" if reasoning.begun else f"({words.spell(reasoning.opening)} thoughts)?"
        thoughts = f'{begun} "\\n"? "\\n"? '
    return StructuredOutputs(grammar="\n".join([f"start: {thoughts}{calls}", *rules]))


def _around_arguments(name: str, form: CallForm | None) -> tuple[str, str]:
    """What stands before and behind the arguments of a function's call."""
    before, after = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ', "}"
    if form is None:
        return before, after
    opening, closing = _literal(form.opening, name) or "", _literal(form.closing, name) or ""
    return (opening, closing) if form.named_outside else (f"{opening}\n{before}", f"{after}\n{closing}")


class _Words:
    """Writes texts as the grammar takes them: special tokens by name, the rest as strings."""

    def __init__(self, special_tokens: Collection[str]) -> None:
        named = [
            re.escape(each) for each in sorted(special_tokens, key=len, reverse=True) if _can_be_named(each)
        ]
        self._special = re.compile(f"({'|'.join(named)})") if named else None

    def is_special(self, text: str) -> bool:
        """Whether a text is one special token."""
        return self._special is not None and self._special.fullmatch(text) is not None

    def spell(self, text: str) -> str:
        """Return a text."""
        parts = [text] if self._special is None else self._special.split(text)
        words = (
            part if index % 2 else json.dumps(part, ensure_ascii=False) for index, part in enumerate(parts)
        )
        return " ".join(word for word in words if word != '""') or '""'


def _can_be_named(token: str) -> bool:
    """Whether a grammar can name a token: it does so in angle brackets."""
    return re.fullmatch(r"<[^<>\s]+>", token) is not None


def _delimiter(field: Mapping[str, Any], side: str) -> str | None:
    """A field's mark as a regular expression; None: it has none."""
    if f"{side}_pattern" in field:
        return str(field[f"{side}_pattern"])
    text = field.get(side)
    first = text[0] if isinstance(text, list) and text else text
    return re.escape(first) if isinstance(first, str) else None


def _literal(pattern: str, name: str) -> str | None:
    """The text that a regular expression stands for, its group `name` filled in; None: it is no fixed text."""
    text, rest = "", pattern
    while rest:
        if found := _OPTIONAL_SPACE.match(rest):
            rest = rest[found.end() :]
        elif found := _NAME_GROUP.match(rest):
            text, rest = text + name, rest[found.end() :]
        elif rest[0] == "\\" and len(rest) > 1 and (rest[1] == "n" or not rest[1].isalnum()):
            text, rest = text + ("\n" if rest[1] == "n" else rest[1]), rest[2:]
        elif rest[0] in ".^$*+?{}[]|()\\":
            return None
        else:
            text, rest = text + rest[0], rest[1:]
    return text
