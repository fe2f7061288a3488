"""Command-line flags made from the config dataclasses, so that names, defaults and help exist once.

A field `kv_memory` becomes the flag `--kv-memory`. Its metadata may hold `help`, `choices` and `parse` (text -> value);
without `parse` the annotation tells how the text is read. Flags that are not given are left out of the namespace, and
so the dataclass alone knows the defaults.
"""

import argparse
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from winnow.units import format_bytes, parse_bytes


def add_flags(parser: argparse.ArgumentParser, config: type, title: str, skip: Collection[str] = ()) -> None:
    """Add one flag per field of the dataclass `config`, except those named in `skip`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in fields(config):
        if field.name not in skip:
            group.add_argument(_flag(field.name), **_arguments(field, hints[field.name]))


def given(namespace: argparse.Namespace, *configs: type) -> dict[str, Any]:
    """The options of `configs` that the user typed, by field name."""
    names = [field.name for config in configs for field in fields(config)]
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _arguments(field: "Field[Any]", hint: Any) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for one field."""
    arguments: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
    choices = field.metadata.get("choices")
    kinds = _kinds(hint)
    if bool in kinds:
        return arguments | {"action": argparse.BooleanOptionalAction}
    parse = field.metadata.get("parse")
    if parse is None:
        element = _element(kinds)
        if element is not None:
            arguments["action"] = "append"
            kinds = _kinds(element)
        parse = _reader(kinds)
    if choices is not None:
        return arguments | {"type": parse, "choices": choices}
    return arguments | {"type": _checked(parse), "metavar": _metavar(field, kinds)}


def _kinds(hint: Any) -> list[Any]:
    """The types a value may have: `int | None` -> [int]."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return [hint]


def _element(kinds: Sequence[Any]) -> Any | None:
    """What a field that holds several values holds: `tuple[str, ...]` -> str; None for a field of one value."""
    for kind in kinds:
        origin = typing.get_origin(kind)
        if isinstance(origin, type) and issubclass(origin, Collection):
            return typing.get_args(kind)[0]
    return None


def _reader(kinds: Sequence[Any]) -> Callable[[str], Any]:
    """The function that reads a value of one of `kinds`; text where nothing else is asked for."""
    if str in kinds:
        return str
    return float if float in kinds else int


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, its complaints in words that argparse passes on instead of naming the function."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            kind = {int: "an integer", float: "a number"}.get(parse)  # type: ignore[call-overload]
            message = f"must be {kind}, got {text!r}" if kind else str(error)
            raise argparse.ArgumentTypeError(message) from error

    return read


def _metavar(field: "Field[Any]", kinds: Sequence[Any]) -> str:
    if field.metadata.get("parse") is parse_bytes:
        return "SIZE"
    if str in kinds:
        return "TEXT"
    return "X" if float in kinds else "N"


def _help(field: "Field[Any]") -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    default = field.default
    if default is MISSING or default is None or default == ():
        return text
    shown = format_bytes(default) if field.metadata.get("parse") is parse_bytes else default
    if isinstance(default, bool):
        shown = "on" if default else "off"
    return f"{text} (default: {shown})"
