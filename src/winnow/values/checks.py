"""Checks of what a user gives. Every error reads "NAME must be WHAT, got VALUE", with the limit in WHAT."""

import dataclasses
import math
import reprlib
import sys
from collections.abc import Collection, Iterable, Sequence, Sized
from numbers import Integral, Real
from typing import Any, NamedTuple

from winnow.errors import ConfigError, WinnowError

MAX_COUNT = 2**31 - 1
"""Limit of every count of tokens, KVs or requests, so that each fits the tensors and kernels that it enters."""

ErrorClass = type[WinnowError]


class Limits(NamedTuple):
    """Limits of a number, both allowed but for `low` where it is `open`; or of the length of a list or mapping."""

    low: float
    high: float = MAX_COUNT
    open: bool = False


def parameter(default: Any, limits: Limits | None = None, most: int | None = None, **kwargs: Any) -> Any:
    """Declare a dataclass field that a request may set.

    Args:
        limits: of the number, and of each where it may be a list of numbers.
        most: entries of a list or mapping, or characters of a text.
    """
    return dataclasses.field(default=default, metadata={"limits": limits, "most": most}, **kwargs)


def require(holds: bool, name: str, what: str, value: object, error: ErrorClass = ConfigError) -> None:
    """Raise `error` unless `holds`: `name` must be `what`, got `value`."""
    if not holds:
        raise error(f"{name} must be {what}, got {show(value)}")


def check_integer(
    name: str, value: Any, low: int, high: int = MAX_COUNT, error: ErrorClass = ConfigError
) -> int:
    """Return `value` as an int. Raises `error`: it is none, or a bool, or not between `low` and `high`."""
    require(isinstance(value, Integral) and not isinstance(value, bool), name, "an integer", value, error)
    check_range(name, value, low, high, error)
    return int(value)


def check_number(
    name: str, value: Any, low: float, high: float = sys.float_info.max, error: ErrorClass = ConfigError
) -> float:
    """Return `value` as a float. Raises `error`: it is none, or a bool, not finite, or not between `low` and `high`."""
    require(isinstance(value, Real) and not isinstance(value, bool), name, "a number", value, error)
    require(isinstance(value, Integral) or math.isfinite(value), name, "finite", value, error)
    check_range(name, value, low, high, error)
    return float(value)


def check_range(name: str, value: Any, low: float, high: float, error: ErrorClass = ConfigError) -> None:
    require(value >= low, name, f"at least {low}", value, error)
    require(value <= high, name, f"at most {high}", value, error)


def check_choice(name: str, value: Any, choices: Iterable[str], error: ErrorClass = ConfigError) -> None:
    known = list(choices)
    require(value in known, name, f"one of {', '.join(known)}", value, error)


def check_names(name: str, values: Sequence[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise ConfigError(f"{name} must name some of {', '.join(known)}, got {show(value)}")
    if len(set(values)) < len(values):
        raise ConfigError(f"{name} must name each once, got {','.join(values)!r}")


def check_length(name: str, values: Sized, high: int, error: ErrorClass = ConfigError) -> None:
    if len(values) > high:
        raise error(f"{name} must have at most {high} entries, got {len(values)}")


def check_counts(config: Any, zero: Collection[str] = ()) -> None:
    """Raise ConfigError for an integer of a dataclass, or of its tuples, below 1, or below 0 in the fields `zero`."""
    for field in dataclasses.fields(config):
        value, low = getattr(config, field.name), int(field.name not in zero)
        for each in value if isinstance(value, tuple) else (value,):
            if type(each) is int:
                check_range(field.name, each, low, math.inf)


def check_list(name: str, value: Any, what: str = "a list", error: ErrorClass = ConfigError) -> Sequence[Any]:
    """Return a sequence that is no text; raises `error`."""
    require(isinstance(value, Sequence) and not isinstance(value, str | bytes), name, what, value, error)
    return value


def show(value: object) -> str:
    """Return a short repr, also of values too large to print."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return f"an enormous {type(value).__name__}"
