"""Text between marks in an answer: reasoning, tool calls and content, as a response template describes them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import regex

# The model's reasoning in response templates.
_THINKING = ("reasoning_content", "thinking", "reasoning")
# A named group up to its end: character classes and escapes hold parentheses that end nothing.
_GROUP = r"\(\?P<{}>(?:\[[^\]]*\]|\\.|[^()\\])*\)"
NAME_GROUP = re.compile(_GROUP.format("name"))
_VALUE_GROUP = re.compile(_GROUP.format("value"))
_OPTIONAL_SPACE = re.compile(r"\\s[*?]")
# Of a quoted text that knows escapes: what may stand in it with a meaning of its own, and its end.
_ESCAPES = r"\\."


class Kind(Enum):
    """Part of the message that a region is."""

    REASONING = "reasoning_content"
    CONTENT = "content"
    CALLS = "tool_calls"
    OTHER = "other"
    """Nothing that a message has."""

    @classmethod
    def of(cls, name: str) -> "Kind":
        if name in _THINKING:
            return cls.REASONING
        return next((kind for kind in cls if kind.value == name), cls.OTHER)


@dataclass(frozen=True)
class Quote:
    """A quoted text within a call, in which nothing ends the call.

    `closing` is its end, or an escape: a match without the group `escape` is the end.
    """

    opening: regex.Pattern[str]
    closing: regex.Pattern[str]

    @classmethod
    def of(cls, opening: str, closing: str, escapes: str = "") -> "Quote":
        closing = f"(?P<escape>{escapes})|(?:{closing})" if escapes else closing
        return cls(regex.compile(opening, regex.DOTALL), regex.compile(closing, regex.DOTALL))


@dataclass(frozen=True)
class Region:
    """Field of a response template.

    Attributes:
        field: as the template has it.
        opening: None: it stands where no other region does.
        closing: None: it goes up to the answer's end.
        repeats: there may be several.
    """

    name: str
    kind: Kind
    field: Mapping[str, Any]
    opening: regex.Pattern[str] | None
    closing: regex.Pattern[str] | None
    repeats: bool
    quotes: tuple[Quote, ...]

    @classmethod
    def of(cls, name: str, field: Mapping[str, Any]) -> "Region":
        marks = [mark_pattern(field, side) for side in ("open", "close")]
        opening, closing = (None if mark is None else regex.compile(mark, regex.DOTALL) for mark in marks)
        kind = Kind.of(name)
        quotes = _quotes(field) if kind is Kind.CALLS else ()
        return cls(name, kind, field, opening, closing, bool(field.get("repeats")), quotes)

    @property
    def checks_itself(self) -> bool:
        """A call that is incomplete cannot be read as a whole one."""
        return self.field.get("content") in ("json", "python-call-list")

    def refuses(self, body: str) -> bool:
        """Return whether text that begins so can be no call."""
        any_text = (self.field.get("content_args") or {}).get("allow_non_json")
        begun = body.lstrip() if self.field.get("content") == "json" and not any_text else ""
        return bool(begun) and begun[0] not in "{["

    def closed_field(self) -> dict[str, Any]:
        """Return the field for a parser of one whole call: its closing mark is the last there is."""
        mark = mark_pattern(self.field, "close")
        field = {name: value for name, value in self.field.items() if name not in ("close", "close_pattern")}
        return field if mark is None else {**field, "close_pattern": rf"(?:{mark})\Z"}


def mark_pattern(field: Mapping[str, Any], side: str) -> str | None:
    """Return a field's mark, such as `open` or `close`, as a regular expression; None: it has none."""
    if field.get(f"{side}_pattern") is not None:
        return str(field[f"{side}_pattern"])
    texts = [text for text in mark_texts(field, side) if text is not None]
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or None


def mark_texts(field: Mapping[str, Any], side: str, name: str = "") -> list[str | None]:
    """Return the texts of a field's mark, its group `name` filled in; a None among them is no fixed text."""
    texts, pattern = field.get(side), field.get(f"{side}_pattern")
    if texts is not None:
        return [texts] if isinstance(texts, str) else list(texts)
    return [] if pattern is None else [_fixed_text(pattern, name)]


def mark_text(field: Mapping[str, Any], side: str, name: str = "") -> str | None:
    """Return the first of a mark's texts; None: it has none."""
    return next(iter(mark_texts(field, side, name)), None)


def _fixed_text(pattern: str, name: str) -> str | None:
    text, rest = "", pattern
    while rest:
        if found := _OPTIONAL_SPACE.match(rest):
            rest = rest[found.end() :]
        elif found := NAME_GROUP.match(rest):
            text, rest = text + name, rest[found.end() :]
        elif rest[0] == "\\" and len(rest) > 1 and (rest[1] == "n" or not rest[1].isalnum()):
            text, rest = text + ("\n" if rest[1] == "n" else rest[1]), rest[2:]
        elif rest[0] in ".^$*+?{}[]|()\\":
            return None
        else:
            text, rest = text + rest[0], rest[1:]
    return text


def _quotes(field: Mapping[str, Any]) -> tuple[Quote, ...]:
    """Return the quotes of a call, by what transformers calls its content."""
    content, options = field.get("content"), field.get("content_args") or {}
    if content == "json":
        own = [Quote.of(re.escape(begin), re.escape(end)) for begin, end in options.get("string_delims", ())]
        return (*own, Quote.of('"', '"', _ESCAPES))
    if content == "python-call-list":
        return tuple(Quote.of(mark, mark, _ESCAPES) for mark in ("'", '"'))
    tag = str(options.get("tag_pattern", ""))
    if content == "xml-inline" and (value := _VALUE_GROUP.search(tag)):
        return (Quote.of(tag[: value.start()], tag[value.end() :]),)
    return ()
