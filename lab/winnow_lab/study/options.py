"""Options of a study: a frozen dataclass whose fields are its flags."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from winnow.cli.flags.engine import add_engine_flags, check_written, engine_options
from winnow.cli.flags.options import reading
from winnow.config.option import option
from winnow.errors import ConfigError

_Options = TypeVar("_Options")


def flag(default: Any = MISSING, text: str = "", **extra: Any) -> Any:
    """Declare an `option` of a study: the flag `--its-name`, read as its annotation says.

    A tuple is typed with commas between its entries, a bool is a switch, and a field without a default must be typed.

    Args:
        text: help.
        extra: as of `option`, and `least`, the smallest number accepted, of a tuple that of each entry; `positional`,
            the value is typed without a flag; `nargs` of a tuple whose entries have spaces between. `choices` of a
            tuple are those of each entry.
    """
    return option(default, text, kw_only=True, **extra)


@dataclass(frozen=True)
class Flags:
    def __post_init__(self) -> None:
        for each in fields(self):
            found, least = getattr(self, each.name), each.metadata.get("least")
            entries = found if isinstance(found, tuple) else () if found is None else (found,)
            for value in entries:
                if least is not None and value < least:
                    raise ConfigError(f"{flag_of(each.name)} must be at least {least:g}, got {value:g}")
                if (choices := each.metadata.get("choices")) and value not in choices:
                    raise ConfigError(f"{flag_of(each.name)}: no {value!r}; known: {', '.join(choices)}")


@dataclass(frozen=True)
class StudyOptions(Flags):
    json: Path | None = flag(None, "write every number to this file")
    output: Path | None = flag(None, "folder of NAME.md and NAME.json, and of figures", short=("-o",))
    name: str = flag("", "of the files in --output (default: the study's)")


@dataclass(frozen=True)
class PageOptions(StudyOptions):
    output: Path | None = flag(Path("docs/results"), "folder of the page and its numbers", short=("-o",))


@dataclass(frozen=True)
class ModelOptions(StudyOptions):
    model: str | None = flag(None, "directory or GGUF file (default: the demo model)")
    threads: int | None = flag(None, "of torch", least=1)


@dataclass(frozen=True)
class RealModelOptions(PageOptions):
    """Flags of a study of the model that `make real-model` fetches, or of another one."""

    model: str = flag("", "directory or GGUF file (default: models/SmolLM2*.gguf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        found = self.model or default_model()
        if found is None:
            raise ConfigError("no models/SmolLM2*.gguf: run make real-model, or name a model with --model")
        object.__setattr__(self, "model", found)


@dataclass(frozen=True)
class EngineFlags(Flags):
    """Flags of a command that takes all options of an engine, but for those that it chooses itself.

    Attributes:
        engine: those that were typed, checked.
        CHOSEN: those without a flag.
        SHOWN: defaults of its own, for `--help`.
    """

    engine: Mapping[str, Any] = field(default_factory=dict, metadata={"is_engine": True}, kw_only=True)
    CHOSEN: ClassVar[tuple[str, ...]] = ()
    SHOWN: ClassVar[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class EngineOptions(EngineFlags, StudyOptions):
    def __post_init__(self) -> None:
        super().__post_init__()
        check_written({"--json": self.json}, self.engine)


def default_model() -> str | None:
    """Return the real model that `make real-model` puts here."""
    found = sorted(Path("models").glob("SmolLM2*.gguf"), key=lambda path: path.name.lower())
    return str(found[0]) if found else None


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse(
    kind: type[_Options], text: str, words: Sequence[str] | None = None, prog: str | None = None
) -> _Options:
    """Read a command line (None: this process's). `--help` begins with `text`; a mistyped flag ends the program."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=text, formatter_class=form, allow_abbrev=False)
    add_options(parser, kind)
    typed = parser.parse_args(words)
    try:
        return options_of(kind, typed)
    except ConfigError as error:
        parser.error(str(error))


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    hints = get_type_hints(kind)
    for each in fields(kind):
        if "is_engine" not in each.metadata:
            _add(parser, each, hints[each.name])
    if issubclass(kind, EngineFlags):  # behind, as flags of other engines give way
        add_engine_flags(parser, kind.CHOSEN, kind.SHOWN)


def options_of(kind: type[_Options], typed: argparse.Namespace) -> _Options:
    names = [each.name for each in fields(kind) if "is_engine" not in each.metadata]  # type: ignore[arg-type]
    own = {name: getattr(typed, name) for name in names}
    if issubclass(kind, EngineFlags):  # which may have options of names that the command uses itself
        others = {name: value for name, value in vars(typed).items() if name not in own}
        own["engine"] = {"check": 0.0, "kv_cache_dtype": "auto"} | engine_options(
            argparse.Namespace(**others)
        )  # unless it is measured
    return kind(**own)


def read_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Read pairs of numbers, such as "1024:8,4096:4"."""
    pairs = [part.partition(":") for part in filter(None, text.split(","))]
    return tuple((int(first), int(second)) for first, _, second in pairs)


def _add(parser: argparse.ArgumentParser, each: "Field[Any]", hint: Any) -> None:
    metadata, default, name = each.metadata, each.default, each.name
    is_tuple, is_positional = get_origin(hint) is tuple, metadata.get("positional")
    if is_tuple and "parse" not in metadata:
        entry = get_args(hint)[0]
        how: dict[str, Any] = {"type": _listed(entry), "metavar": "A,B,..."}
        if is_positional or "nargs" in metadata:
            how = {"type": entry, "metavar": name.upper()}
    else:
        how = reading(each, hint)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    known = f"of: {', '.join(metadata['choices'])}" if is_tuple and "choices" in metadata else ""
    usual = "" if default in (None, MISSING, "", False, ()) else f"(default: {shown})"
    how |= {
        "default": default,
        "help": " ".join(filter(None, (metadata["help"], known, usual))).replace("%", "%%"),
    }
    if is_positional:
        many = {} if default is MISSING else {"nargs": "*" if is_tuple else "?"}
        parser.add_argument(name, **how | many)
    else:
        how |= {key: metadata[key] for key in ("nargs", "metavar") if key in metadata}
        flags = [*metadata.get("short", ()), *map(flag_of, (name, *metadata.get("aliases", ())))]
        parser.add_argument(*flags, dest=name, required=default is MISSING, **how)


def _listed(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def entries(text: str) -> tuple[Any, ...]:
        parts = [each.strip() for each in text.split(",")] if text.strip() else []
        if not all(parts):
            raise ValueError("an entry is empty")
        return tuple(map(read, parts))

    entries.__name__ = f"{getattr(read, '__name__', 'value')} list"
    return entries
