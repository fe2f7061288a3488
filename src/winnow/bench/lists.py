"""Lists with commas between, as a command line gives them."""

from collections.abc import Callable
from typing import TypeVar

_Number = TypeVar("_Number", int, float)


def names(text: str) -> tuple[str, ...]:
    """Names, without white space around them."""
    return tuple(name.strip() for name in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers; raises ValueError where one is none."""
    return _numbers(text, int, "whole numbers")


def numbers(text: str) -> tuple[float, ...]:
    """Numbers; raises ValueError where one is none."""
    return _numbers(text, float, "numbers")


def _numbers(text: str, kind: Callable[[str], _Number], what: str) -> tuple[_Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"must be {what} with commas between, got {text!r}") from None
