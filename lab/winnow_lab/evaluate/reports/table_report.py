"""A measurement of one table as files: its numbers as JSON, the table as Markdown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winnow.report.provenance import origin
from winnow.values.json_values import dump_json
from winnow_lab.evaluate.result_files import RESULTS, TABLES
from winnow_lab.report.tables import TextTable


def write_table_report(
    name: str,
    table: TextTable,
    note: str,
    values: Mapping[str, Any],
    directory: Path,
    head: Mapping[str, Any],
) -> list[Path]:
    """Write results.json and results.md; returns their paths.

    Args:
        name: of the command of `winnow eval`.
        note: how the table is to be read.
        values: what results.json holds besides `head`.
        head: `command`, `date`, `commit`, `machine`, `model` and the settings.
    """
    results, tables = directory / RESULTS, directory / TABLES
    results.write_text(dump_json({**head, "task": name, **values}, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# winnow eval {name}",
        "",
        *origin(head),
        f"- model: {head['model']}",
        "",
        note,
        "",
        *table.markdown(),
    ]
    tables.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [results, tables]
