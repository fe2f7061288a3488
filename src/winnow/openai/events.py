"""Server-sent events, in which streams are written."""

import json
from typing import Any

from winnow.values.json_values import dump_json

# Made once: json.dumps would make one for every event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else compact_json(data)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"


def compact_json(value: Any) -> str:
    """Dump JSON in as few characters as it takes."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return dump_json(value, ensure_ascii=False, separators=(",", ":"))
