"""Command-line flags made from the config dataclasses, so that names, defaults and help exist once.

A field `kv_memory` becomes the flag `--kv-memory`. Its metadata may hold `help`, `choices`, `parse` (text -> value)
with its `metavar`, and `aliases`, earlier names that stay as flags.
Without `help` the "Attributes" part of the class's docstring is asked; without `parse` the annotation tells how the
text is read. Flags that are not given are left out of the namespace, and so the dataclass alone knows the defaults.
"""

import argparse
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

from winnow.config.option import documented
from winnow.errors import UsageError
from winnow.models.load.hub import is_repository
from winnow.values.units import format_bytes, parse_bytes


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    common: Collection[str] | None = None,
) -> None:
    """Add one flag per field of the dataclass `config`, except those named in `skip`.

    Args:
        defaults: shown in place of the dataclass's own, for a command that fills them in itself.
        common: fields that `--help` shows, in a mapping's words for them, while `--help all` shows the others too;
            None: all.
    """
    group = parser.add_argument_group(title)
    hints, texts = typing.get_type_hints(config), documented(config)
    for field in fields(config):
        if field.name not in skip:
            text = field.metadata.get("help", texts.get(field.name, ""))
            action = group.add_argument(
                *("--" + name.replace("_", "-") for name in (field.name, *field.metadata.get("aliases", ()))),
                *field.metadata.get("short", ()),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=_help(field, text, defaults.get(field.name, field.default)),
                **reading(field, hints[field.name]),
            )
            if common is not None and field.name not in common:
                vars(action)["rare"] = True
            elif isinstance(common, Mapping):
                vars(action)["brief"] = _help(
                    field, common[field.name], defaults.get(field.name, field.default)
                )


def rare_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags that only `--help all` shows."""
    return [action for action in parser._actions if vars(action).get("rare")]


def add_model_argument(
    parser: argparse.ArgumentParser, help: str = "the model, as --model", *, flag: bool = False
) -> None:
    """Let the model be given by position too; `flag` declares `--model`, for a command without the engine's flags."""
    parser.add_argument("model_by_position", metavar="MODEL", nargs="?", help=help)
    if flag:
        parser.add_argument("--model", metavar="MODEL", help="the same as MODEL")


def require_model(namespace: argparse.Namespace, command: str) -> None:
    if namespace.model is None:
        raise UsageError(f"the following arguments are required: MODEL (see `winnow {command} --help`)")


def merge_model(namespace: argparse.Namespace) -> None:
    """Put a model that was given by position where `--model` puts it, and the file of `--hf-file` behind its name.
    Raises UsageError: it is given twice, or the file is of no repository."""
    file = vars(namespace).pop("hf_file", None)
    _merge_position(namespace)
    if file is not None:
        repository = str(getattr(namespace, "model", None))
        if not is_repository(repository):
            raise UsageError(f"--hf-file needs a model of the Hub (-hf owner/name), got {repository}")
        namespace.model = f"{repository.partition(':')[0]}:{file}"


def _merge_position(namespace: argparse.Namespace) -> None:
    by_position = vars(namespace).pop("model_by_position", None)
    if by_position is None:
        return
    by_flag = getattr(namespace, "model", None)
    if by_flag not in (None, by_position):
        raise UsageError(f"the model is given twice: {by_position} and --model {by_flag}")
    namespace.model = by_position


def given(namespace: argparse.Namespace, *configs: type) -> dict[str, Any]:
    """Return the options of `configs` that the user typed, by field name."""
    names = [field.name for config in configs for field in fields(config)]
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


@dataclass(frozen=True)
class _Reader:
    parse: Callable[[str], Any]
    metavar: str
    expects: str = ""
    """Expected form, for readers whose own message does not say."""

    def __call__(self, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError as error:
            message = f"must be {self.expects}, got {text!r}" if self.expects else str(error)
            raise argparse.ArgumentTypeError(message) from error

    def arguments(self) -> dict[str, Any]:
        return {"type": self, "metavar": self.metavar}


_INTEGER = _Reader(int, "N", "an integer")
_NUMBER = _Reader(float, "X", "a number")


def _text(typed: str) -> str:
    typed.encode()  # bytes that are no UTF-8 arrive as lone surrogates
    return typed


_TEXT = _Reader(_text, "TEXT", "UTF-8 text")
_PATH = _Reader(str, "DIR")
_FILE = _Reader(Path, "FILE")
_OBJECT = _Reader(json.loads, "JSON", "a JSON object")


def reading(field: "Field[Any]", hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that say how the value of a field with the type `hint` is read."""
    kinds = list(typing.get_args(hint)) if isinstance(hint, types.UnionType) else [hint]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    parse = field.metadata.get("parse")
    if parse is parse_bytes:
        return _Reader(lambda text: parse_bytes(text, field.name), "SIZE").arguments()
    if parse is not None:
        return _Reader(parse, field.metadata.get("metavar", "N")).arguments()
    if "choices" in field.metadata:
        return {"choices": field.metadata["choices"]}
    for kind in kinds:
        origin = typing.get_origin(kind)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return _OBJECT.arguments()
        if isinstance(origin, type) and issubclass(origin, Collection):
            # A flag that may be repeated, one value each time.
            return _reader(list(typing.get_args(kind))).arguments() | {"action": "append"}
    return _reader(kinds).arguments()


def _reader(kinds: list[Any]) -> _Reader:
    if str in kinds:
        return _PATH if Path in kinds else _TEXT
    if Path in kinds:
        return _FILE
    reader = _NUMBER if float in kinds else _INTEGER
    if types.NoneType in kinds:
        parse = reader.parse
        return _Reader(
            lambda text: None if text.lower() == "none" else parse(text),  # the way to switch off a limit
            reader.metavar,
            f"{reader.expects} or none",
        )
    return reader


def _help(field: "Field[Any]", text: str, default: Any) -> str:
    # Argparse would take a lone % for its own.
    text = text.replace("%", "%%").replace("`", "").rstrip(".")
    if default is MISSING or default is None or default == ():
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif field.metadata.get("parse") is parse_bytes:
        default = format_bytes(default)
    return f"{text} (default: {default})"
