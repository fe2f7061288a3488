"""Results as JSON that shows in a diff which entries changed."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from winnow.json_values import dump_json


def results_json(numbers: Mapping[str, Any], lists: Collection[str] = ("cells",)) -> str:
    """A line for each field, and for each entry of the fields in `lists`."""
    parts = []
    for name, value in numbers.items():
        text = "[\n" + ",\n".join(map(dump_json, value)) + "\n]" if name in lists else dump_json(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
