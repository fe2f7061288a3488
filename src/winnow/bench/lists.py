"""What benches are asked for: lists with commas between, and what they must be."""

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar

from winnow.errors import ConfigError

_Number = TypeVar("_Number", int, float)


def names(text: str) -> tuple[str, ...]:
    """Names, without white space around them."""
    return tuple(name.strip() for name in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers; raises ValueError where one is none."""
    return _numbers(text, int, "integers")


def numbers(text: str) -> tuple[float, ...]:
    """Numbers; raises ValueError where one is none."""
    return _numbers(text, float, "numbers")


def _numbers(text: str, kind: Callable[[str], _Number], what: str) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"must be {what} with commas between, got {text!r}") from None


def require_counts(config: Any, zero: Collection[str] = ()) -> None:
    """Refuse whole numbers of a dataclass that are below 1, or below 0 in the fields of `zero`; in tuples too.

    Raises:
        ConfigError: names field, limit and value.
    """
    for field in fields(config):
        value, least = getattr(config, field.name), int(field.name not in zero)
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is int and each < least:
                raise ConfigError(f"{field.name} must be at least {least}, got {each}")


def require_names(field: str, typed: tuple[str, ...], known: Collection[str]) -> None:
    """Refuse names that are not `known`, or come twice.

    Raises:
        ConfigError: names field, limit and value.
    """
    for name in typed:
        if name not in known:
            raise ConfigError(f"{field} must name some of {', '.join(known)}, got {name!r}")
    if len(set(typed)) < len(typed):
        raise ConfigError(f"{field} must name each once, got {','.join(typed)!r}")
