"""A perplexity measurement as a table."""

from collections.abc import Sequence

from winnow.values.units import format_bytes
from winnow_lab.evaluate.perplexity import Change, Perplexity
from winnow_lab.report.tables import Footnotes, TextTable

NOTE = """\
Of each window the first tokens are given: they are computed, and a policy cuts their KVs before it has seen what
follows. The others are forced one by one, with the policy's rounds in between; they alone count. "of full" is a
perplexity over that of the full cache on the same windows, with the standard error over windows."""


def perplexity_table(rows: Sequence[Perplexity], title: str) -> TextTable:
    """Return a row for each way of keeping KVs; the first one is what the others are compared with."""
    notes = Footnotes()
    lines = [
        (row.name, (notes.mark(row.refusal), "", "", ""))
        if row.refusal is not None
        else (row.name, _entries(row, None if row is rows[0] else row.over(rows[0])))
        for row in rows
    ]
    columns = ("perplexity", "of full", "KVs per row", "KV memory")
    return TextTable(title, "preset", columns, tuple(lines), notes.lines())


def _entries(row: Perplexity, change: Change | None) -> tuple[str, ...]:
    assert row.value is not None and row.mean_kept is not None and row.kv_bytes is not None, "refused"
    return f"{row.value:.2f}", _change(change), f"{row.mean_kept:,.0f}", format_bytes(round(row.kv_bytes))


def _change(change: Change | None) -> str:
    if change is None:
        return ""
    return f"{change.ratio:.3f}" + ("" if change.error is None else f" ± {change.error:.3f}")
