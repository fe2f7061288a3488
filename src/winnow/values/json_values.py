"""Conversion of values to JSON."""

import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def json_value(value: Any) -> Any:
    """Return `value` as JSON types; a dataclass becomes its class name and all its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
        return {"class": type(value).__name__} | values
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [json_value(entry) for entry in value]
    if isinstance(value, frozenset | set):
        return sorted(map(json_value, value))
    if isinstance(value, dict):
        return {str(key): json_value(entry) for key, entry in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def dump_json(value: Any, **options: Any) -> str:
    """Return strict JSON text; infinite numbers and NaN become null."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **options)


def parse_strict(data: bytes) -> Any:
    """Return the value of a JSON text, strictly: UTF-8, finite numbers, whole characters, of bounded depth. Raises
    ValueError: says what is wrong with it, and where that is known."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_float=_finite_number, parse_constant=_finite_number)
        if "\\ud" in text.lower():
            # JSON can spell half of a surrogate pair, which no UTF-8 file can hold and no tokenizer read.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise ValueError("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"unreadable JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"unreadable JSON: {error}") from None
    return value


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def json_kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, tuple | list) else value
