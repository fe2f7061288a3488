"""Values from outside are refused by name, with value and limit."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from winnow.errors import ConfigError, InvalidRequestError
from winnow.values.checks import (
    check_choice,
    check_counts,
    check_integer,
    check_length,
    check_list,
    check_names,
    check_number,
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "x must be at least 1, got 0"),
        (9, "x must be at most 8, got 9"),
        (True, "x must be an integer, got True"),
        (1.0, "x must be an integer, got 1.0"),
        ("1", "x must be an integer, got '1'"),
    ],
)
def test_integers(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_integer("x", value, 1, 8)
    with pytest.raises(ConfigError, match="x must be at most 8, got an enormous int"):
        check_integer("x", 10**5000, 1, 8)
    assert check_integer("x", np.int64(8), 1, 8) == 8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "x must be finite, got nan"),
        (math.inf, "x must be finite, got inf"),
        (-0.5, "x must be at least 0, got -0.5"),
        (False, "x must be a number, got False"),
        (10**400, "x must be at most 1.79"),  # no float holds it
    ],
)
def test_numbers(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_number("x", value, 0, error=InvalidRequestError)
    assert check_number("x", 2, 0) == 2.0


def test_choices_names_and_lists() -> None:
    check_choice("x", "a", ("a", "b"))
    with pytest.raises(ConfigError, match="x must be one of a, b, got 'c'"):
        check_choice("x", "c", ("a", "b"))
    with pytest.raises(ConfigError, match="x must name some of a, b, got 'c'"):
        check_names("x", ("a", "c"), ("a", "b"))
    with pytest.raises(ConfigError, match="x must name each once, got 'a,a'"):
        check_names("x", ("a", "a"), ("a", "b"))
    with pytest.raises(ConfigError, match="x must be a list, got 'text'"):
        check_list("x", "text")
    with pytest.raises(ConfigError, match="x must have at most 1 entries, got 2"):
        check_length("x", [1, 2], 1)


@dataclass(frozen=True)
class Work:
    requests: int = 1
    lengths: tuple[int, ...] = (1,)
    seed: int = 0


def test_counts_of_a_dataclass() -> None:
    check_counts(Work(), zero=("seed",))
    for work, message in (
        (Work(0), "requests must be at least 1"),
        (Work(lengths=(2, 0)), "lengths must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_counts(work, zero=("seed",))
    with pytest.raises(ConfigError, match="seed must be at least 1, got 0"):
        check_counts(Work())
