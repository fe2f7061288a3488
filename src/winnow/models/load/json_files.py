"""The JSON files of a model's directory, which strangers wrote."""

import json
from pathlib import Path
from typing import Any

from winnow.errors import UnsupportedModelError

_FLOAT = "__float__"
_FLOATS = ("Infinity", "-Infinity", "NaN")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    `{"__float__": "Infinity"}`, as transformers writes what JSON lacks, is a number.

    Raises:
        UnsupportedModelError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnsupportedModelError(
            f"model: cannot load {file.parent}: cannot read {file.name}: {reason}"
        ) from None
    if not isinstance(values, dict):
        raise UnsupportedModelError(
            f"model: cannot load {file.parent}: {file.name} must hold a JSON object, got {json.dumps(values):.40}"
        )
    return values


def _special_float(values: dict[str, Any]) -> Any:
    return float(values[_FLOAT]) if set(values) == {_FLOAT} and values[_FLOAT] in _FLOATS else values
