"""Byte sizes as text: "512MiB" in, "512.0 MiB" out."""

import re
from typing import Any

from winnow.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, _letter: 1024**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str, field: str = "kv_memory") -> int:
    """Return bytes from an int or from text such as "512MiB", "1.5 GiB", "2GB" or "64M" (binary). Raises ConfigError,
    which names `field`, for what is no positive size, or has an unknown unit."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ConfigError(f"{field} must be a size such as 512MiB, 1.5GiB or 2GB, got {value!r}")
        size = int(float(match[1]) * unit)
    if size <= 0:
        raise ConfigError(f"{field} must be at least 1 byte, got {value!r}")
    return size


def gibibytes(value: Any) -> Any:
    """Return bytes from a number of GiB, also as text; 0 -> None. What has a unit is returned as it is."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number * 2**30) or None


def format_bytes(size: float) -> str:
    """Write a size with a binary unit and one decimal: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
