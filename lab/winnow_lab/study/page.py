"""Results as files: a page of Markdown with figures, and JSON that shows in a diff which entries changed."""

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.values.json_values import dump_json
from winnow_lab.report.tables import TextTable


def page(
    title: str,
    heads: Sequence[Mapping[str, Any]],
    facts: Sequence[str],
    notes: str,
    tables: Sequence[TextTable],
    figures: Sequence[Path] = (),
) -> str:
    """Everything that a reader of the results needs.

    Args:
        heads: of `report_head`, one for each command and commit that measured something.
        notes: what columns mean; Markdown that ends a line.
    """
    lines = [f"# {title}", ""]
    for head in heads:
        lines += _origin(head)
    lines += [*facts, "", notes]
    for table in tables:
        lines += table.markdown()
    lines += [text for path in figures for text in (f"![{path.stem.replace('_', ' ')}]({path.name})", "")]
    return "\n".join(lines).rstrip() + "\n"


def results_json(numbers: Mapping[str, Any], lists: Collection[str] = ("cells",)) -> str:
    """A line for each field, and for each entry of the fields in `lists`."""
    parts = []
    for name, value in numbers.items():
        text = "[\n" + ",\n".join(map(dump_json, value)) + "\n]" if name in lists else dump_json(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _origin(head: Mapping[str, Any]) -> list[str]:
    machine = head["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch_version']}"
    return [
        f"    {shlex.join(head['command'])}",
        "",
        f"(commit {head['commit']}; {where}; {head['date'][:10]})",
        "",
    ]
