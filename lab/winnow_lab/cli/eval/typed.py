"""Readers of the flags of `winnow eval`."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from winnow_lab.bench.lists import integers, numbers

_Number = TypeVar("_Number", int, float)


def names(text: str) -> tuple[str, ...]:
    """Return names with commas between, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return found


def compressions(text: str) -> tuple[float, ...]:
    """Return numbers of at least 1 with commas between, ascending, each once."""
    found = _ascending(numbers, text)
    if not all(1.0 <= each < math.inf for each in found):
        raise argparse.ArgumentTypeError(f"must be finite numbers of at least 1, got {text!r}")
    return found


def lengths(text: str) -> tuple[int, ...]:
    """Return the whole numbers of at least 1 with commas between, ascending, each once."""
    found = _ascending(integers, text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers of at least 1, got {text!r}")
    return found


def count(least: int) -> Callable[[str], int]:
    """Return a whole number of at least `least`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return value

    return read


def _ascending(read: Callable[[str], tuple[_Number, ...]], text: str) -> tuple[_Number, ...]:
    try:
        return tuple(sorted(set(read(text))))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
