"""Lists with commas between, as a command line gives them."""

from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def names(text: str) -> tuple[str, ...]:
    """Return names, without white space around them."""
    return tuple(name.strip() for name in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Return the whole numbers; raises ValueError where one is none."""
    return _numbers(text, int, "whole numbers")


def numbers(text: str) -> tuple[float, ...]:
    """Return numbers; raises ValueError where one is none."""
    return _numbers(text, float, "numbers")


def _numbers(text: str, kind: Callable[[str], _Number], what: str) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"must be {what} with commas between, got {text!r}") from None
