"""The tables of rows."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from winnow.values.units import format_bytes
from winnow_lab.evaluate.cell import FULL_CELL, QUERIES
from winnow_lab.evaluate.perplexity import Perplexity
from winnow_lab.real.rows import GIVEN, LABELS, MIN_SCORE, WINDOW, Row, counts
from winnow_lab.report.tables import TextTable


def tables(
    rows: Sequence[Row], perplexities: Sequence[Perplexity], least: float = MIN_SCORE
) -> list[TextTable]:
    """The full cache, then for each way of asking the means and every category at every compression."""
    full = {row.work: row for row in rows if row.cell == FULL_CELL.name}
    counted = [name for name, row in full.items() if counts(row, least)]
    entries = tuple(
        (name, (_scored(row), f"{row.answers}", "" if name in counted else "no", _bytes(row)))
        for name, row in full.items()
    )
    found = [TextTable("Full cache", "category", ("score", "answers", "counts", "KV memory"), entries)]
    for query in QUERIES:
        shown = [row for row in rows if row.query == query and row.work in counted]
        if shown:
            found += _query_tables(query, shown, full)
    if perplexities:
        lines = [(each.name, _perplexity_entries(each, perplexities[0])) for each in perplexities]
        title = f"Perplexity of {WINDOW - GIVEN:,} tokens after {GIVEN:,} that were judged"
        found.append(TextTable(title, "policy", ("perplexity", "of full", "KV memory"), tuple(lines)))
    return found


def _query_tables(query: str, shown: Sequence[Row], full: dict[str, Row]) -> Iterator[TextTable]:
    methods = list(dict.fromkeys(row.method for row in shown))
    amounts = sorted({row.compression or 0.0 for row in shown})
    names = [name for name in full if any(row.work == name for row in shown)]
    at = {(row.work, row.method, row.compression): row for row in shown}
    label = f"Question {LABELS[query]}"
    lines = []
    for method in methods:
        cells = [[at.get((name, method, amount)) for name in names] for amount in amounts]
        lines.append((method, tuple(_mean_entry([c for c in each if c], full, len(names)) for each in cells)))
    yield TextTable(
        f"{label}: share of the full cache's mean over {len(names)} categories, and KV memory of an answer",
        "policy",
        tuple(f"{amount:g}x" for amount in amounts),
        tuple(lines),
    )
    for amount in amounts:
        held = [m for m in methods if any((name, m, amount) in at for name in names)]
        table = [
            (name, tuple(_scored(each) for each in (full[name], *(at.get((name, m, amount)) for m in held))))
            for name in names
        ]
        yield TextTable(f"{label}, {amount:g}x", "category", ("full cache", *held), tuple(table)).upright()
    timed = [row for row in shown if row.seconds is not None]
    if timed:
        references = {row.work: full[row.work] for row in timed}
        yield TextTable(
            f"{label}: one document and all its questions, alone",
            "cell",
            ("score", "seconds", "KV memory"),
            tuple(
                (f"{row.method} {row.compression:g}x" if row.query else "full cache", _timed(row))
                for row in (*references.values(), *timed)
            ),
        )


def _mean_entry(rows: Sequence[Row], full: dict[str, Row], wanted: int) -> str:
    """Mean over categories as a share of the full cache's, its standard error, and bytes."""
    known = [row for row in rows if row.score is not None]
    if not known:
        return "refused" if rows else ""
    part = "" if len(known) == wanted else f" of {len(known)}"
    mean, error = share_of_full(known, full)
    held = fmean(row.kv_bytes or 0.0 for row in known)
    return f"{mean:.2f} ± {error:.2f}{part}, {format_bytes(round(held))}"


def share_of_full(known: Sequence[Row], full: dict[str, Row]) -> tuple[float, float]:
    """Mean score over categories as a share of the full cache's, and its standard error."""
    reference = fmean(full[row.work].score or 0.0 for row in known)
    error = math.sqrt(sum((row.error or 0.0) ** 2 for row in known)) / len(known)
    return fmean(row.score or 0.0 for row in known) / reference, error / reference


def _scored(row: Row | None) -> str:
    if row is None or row.score is None:
        return "" if row is None else "refused"
    return f"{row.score:.2f}" if row.error is None else f"{row.score:.2f} ± {row.error:.2f}"


def _bytes(row: Row) -> str:
    return "" if row.kv_bytes is None else format_bytes(round(row.kv_bytes))


def _timed(row: Row) -> tuple[str, str, str]:
    return _scored(row), "" if row.seconds is None else f"{row.seconds:.1f}", _bytes(row)


def _perplexity_entries(each: Perplexity, full: Perplexity) -> tuple[str, ...]:
    if each.value is None or each.kv_bytes is None:
        return ("refused", "", "")
    change = None if each is full else each.over(full)
    ratio = "" if change is None else f"{change.ratio:.3f} ± {change.error or 0.0:.3f}"
    return (f"{each.value:.2f}", ratio, format_bytes(round(each.kv_bytes)))
