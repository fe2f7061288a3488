"""Results as a page of Markdown, with figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.evaluate.origin import origin_of_run
from winnow.text_table import TextTable


def page(
    title: str,
    heads: Sequence[Mapping[str, Any]],
    facts: Sequence[str],
    notes: str,
    tables: Sequence[TextTable],
    figures: Sequence[Path],
) -> str:
    """Everything that a reader of the results needs.

    Args:
        heads: of `report_head`, one for each command and commit that measured something.
        facts: sentences about the work.
        notes: what columns mean; Markdown that ends a line.
        figures: PNG files beside the page.
    """
    lines = [f"# {title}", ""]
    for head in heads:
        lines += origin_of_run(head)
    lines += [*facts, "", notes]
    for table in tables:
        lines += table.markdown()
    lines += [text for path in figures for text in (f"![{path.stem.replace('_', ' ')}]({path.name})", "")]
    return "\n".join(lines).rstrip() + "\n"
