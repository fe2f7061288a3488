"""The results as tables of text."""

from collections.abc import Iterable, Sequence

from benchmarks.papers.baton.bars import BARS
from benchmarks.papers.baton.cells import MODES
from benchmarks.papers.baton.measured import Row, find
from benchmarks.papers.baton.paper import MIXED, SETS, published_gain
from winnow.text_table import TextTable
from winnow.units import format_bytes

_NAMES = {MIXED: "Mixed set, 120 queries (Table 1)", "short": "Short set, 30 queries (Table 2)"}


def all_tables(rows: Sequence[Row]) -> list[TextTable]:
    """Of each set: times and gains by mode and batch size, then what belongs to each cell; the bars last."""
    tables = []
    for query_set in SETS:
        of_set = [row for row in rows if row.cell.query_set == query_set]
        if of_set:
            tables += [completion(query_set, of_set), details(query_set, of_set)]
    beside = bars(rows)
    return [*tables, *([beside] if beside.rows else [])]


def completion(query_set: str, rows: Sequence[Row]) -> TextTable:
    """A row per mode, a column per batch size."""
    batches = sorted({row.cell.batch for row in rows})
    lines = []
    for mode in MODES:
        found = [find(rows, query_set, mode, batch) for batch in batches]
        if any(found):
            lines.append((mode, tuple(_brief(row) for row in found)))
    return TextTable(
        f"{_NAMES[query_set]}: seconds to complete, times faster than static, in brackets the paper's",
        "mode",
        tuple(f"batch {batch}" for batch in batches),
        tuple(lines),
    )


def details(query_set: str, rows: Sequence[Row]) -> TextTable:
    """A row per batch size and mode."""
    ordered = sorted(rows, key=lambda row: (row.cell.batch, MODES.index(row.cell.mode)))
    return TextTable(
        f"{_NAMES[query_set]}: where the time goes",
        "batch, mode",
        ("passes", "by passes", "prefill s", "decode s", "idle", "columns", "KV peak", "differ"),
        tuple((f"{row.cell.batch}, {row.cell.mode}", _detail(row)) for row in ordered),
    )


def bars(rows: Sequence[Row]) -> TextTable:
    """Each bar beside what was measured."""
    lines, notes = [], []
    for bar in BARS:
        fast = find(rows, bar.query_set, bar.mode, bar.batch)
        slow = find(rows, bar.query_set, bar.over, bar.batch)
        if fast is None or slow is None:
            continue
        gain = slow.seconds / fast.seconds
        passes = slow.first.tally["passes"] / fast.first.tally["passes"]
        most = fast.most_pass_gain if bar.over == "static" else None
        name = f"{bar.query_set}, batch {bar.batch}: {bar.mode} over {bar.over}"
        missed = "met" if gain >= bar.least else f"missed by {1 - gain / bar.least:.0%}"
        if gain < bar.least and bar.cause:
            notes.append(f"{name}, {gain:.2f}x: {bar.cause}")
        lines.append(
            (
                name,
                (
                    f"{bar.least:.2f}x",
                    f"{gain:.2f}x",
                    missed,
                    f"{passes:.2f}x",
                    "" if most is None else f"{most:.2f}x",
                    _share(fast.first.idle_share),
                ),
            )
        )
    return TextTable(
        "Beside what the paper reports",
        "",
        ("paper", "here", "", "by passes", "at most", "idle"),
        tuple(lines),
        tuple(notes),
    )


def _brief(row: Row | None) -> str:
    if row is None:
        return ""
    parts = [f"{row.seconds:.2f} s"]
    if row.gain is not None:
        parts.append(f"{row.gain:.2f}x")
    paper = published_gain(row.cell.query_set, row.cell.mode, row.cell.batch)
    if paper is not None:
        parts.append(f"({paper:.2f}x)")
    return " ".join(parts)


def _detail(row: Row) -> tuple[str, ...]:
    run = row.first
    tally = run.tally
    return (
        f"{tally['passes']:.0f}" if tally else "",
        "" if row.pass_gain is None else f"{row.pass_gain:.2f}x",
        *(_seconds(tally, name) for name in ("prefill_seconds", "decode_seconds")),
        _share(run.idle_share),
        "" if run.column_share is None else f"{run.column_share:.2f}",
        format_bytes(run.kv_bytes_peak),
        "" if row.differing is None else f"{row.differing}",
    )


def _seconds(tally: dict[str, float], name: str) -> str:
    return f"{tally[name]:.2f}" if tally else ""


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def spread_lines(rows: Sequence[Row]) -> list[str]:
    """How often cells were run, and how much the machine wavered."""
    counts = sorted({len(row.runs) for row in rows})
    if counts[-1:] == [1]:
        return ["Each cell was run once."]
    widest = max(rows, key=lambda row: row.spread)
    times = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return [
        f"Each cell was run {times} times; most less least seconds are at most {widest.spread:.0%} of the median "
        f"({widest.cell.query_set}, batch {widest.cell.batch}, {widest.cell.mode})."
    ]


def differing_lines(rows: Iterable[Row]) -> list[str]:
    """What is to be said of answers that are not the same in all modes."""
    told = [row for row in rows if row.differing]
    if not told:
        return ["All modes gave the same tokens to every query."]
    return [
        f"{row.cell.query_set}, batch {row.cell.batch}, {row.cell.mode}: {row.differing} of "
        f"{len(row.first.digests)} answers differ from static's."
        for row in told
    ]
