"""Format numbers of the papers' experiments as text."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_Row = TypeVar("_Row")
Columns = Mapping[str, Callable[[_Row], str | None]]
"""How the entries of a row are written, by the head of their column."""


def median_and_range(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, least, most."""
    found = list(values)
    return statistics.median(found), min(found), max(found)


def formatted(value: float | None, form: str) -> str:
    """`value` as `form` prints it, such as "{:.2f}x"; empty where there is none."""
    return "" if value is None else form.format(value)
