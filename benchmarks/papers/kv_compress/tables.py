"""The results as tables of text, for terminals and for Markdown."""

from collections.abc import Sequence

from benchmarks.papers.kv_compress.grid import FULL, Grid
from benchmarks.papers.kv_compress.paper import PUBLISHED
from benchmarks.papers.kv_compress.row import Row
from winnow.text_table import TextTable
from winnow.units import format_bytes


def all_tables(grid: Grid, rows: Sequence[Row]) -> list[TextTable]:
    """Of each context: both policies side by side, then what belongs to each run; the paper's numbers last."""
    tables = []
    for context in grid.contexts:
        of_context = [row for row in rows if row.cell.context == context]
        if of_context:
            tables += [side_by_side(grid, of_context), details(grid, of_context)]
    return [*tables, beside_the_paper(grid, rows)]


def side_by_side(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """A line per compression of one context: the bound, then each policy's gain, share of the bound and batch."""
    context = rows[0].cell.context
    lines = []
    for compression in sorted({row.cell.compression for row in rows}):
        same = [row for row in rows if row.cell.compression == compression]
        line = [f"{same[0].bound:.2f}x"]
        for preset in grid.policies:
            # The full cache stands on both sides.
            row = next((row for row in same if row.cell.preset in (preset, FULL)), None)
            line += ["", "", "", ""] if row is None else _brief(row)
        lines.append((f"{compression:g}x", tuple(line)))
    columns = ("gain", "of bound", "batch", "score")
    return TextTable(
        f"{context} + {grid.answer_tokens(context)} tokens: whole-prompt prefill, then P&D",
        "asked",
        ("bound", *columns, f"P&D {columns[0]}", *columns[1:]),
        tuple(lines),
    )


def details(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """A line per cell of one context."""
    context = rows[0].cell.context
    return TextTable(
        f"{context} + {grid.answer_tokens(context)} tokens, each policy",
        "policy",
        (
            "asked",
            "reached",
            "tokens/s",
            "spread",
            "bound",
            "own",
            "mean",
            "most",
            "preempt",
            "rounds",
            "KV peak",
        ),
        tuple((_policy(grid, row), _detail(row)) for row in rows),
    )


def beside_the_paper(grid: Grid, rows: Sequence[Row]) -> TextTable:
    """The paper's gains, each beside ours at the same compression over the nearest context."""
    lines = []
    for each in PUBLISHED:
        at = [row for row in rows if row.cell.compression == each.compression]
        wanted = int(each.context or 6000)
        ours = []
        for preset in grid.policies:
            candidates = [row for row in at if row.cell.preset == preset]
            nearest = min(candidates, key=lambda row: abs(row.cell.context - wanted), default=None)
            ours.append("" if nearest is None else f"{nearest.gain:.2f}x at {nearest.cell.context}")
        lines.append(
            (
                f"{each.setting}, {each.context} tokens" if each.context else each.setting,
                (f"{each.compression:g}x", f"{each.gain:.2f}x", *ours, each.differs),
            )
        )
    return TextTable(
        "The paper's gains over vLLM with the full cache (5.4), beside ours over Winnow's at the nearest context",
        "paper",
        ("compression", "gain", "ours, whole prompt", "ours, P&D", "what differs there"),
        tuple(lines),
        words=(4,),
    )


def _brief(row: Row) -> list[str]:
    return [f"{row.gain:.2f}x", f"{row.share:.0%}", f"{row.first.most_batch}", _accuracy(row)]


def _policy(grid: Grid, row: Row) -> str:
    return {FULL: "full", grid.whole: "whole", grid.p_and_d: "P&D"}[row.cell.preset]


def _detail(row: Row) -> tuple[str, ...]:
    run = row.first
    median, least, most = row.rates
    return (
        f"{row.cell.compression:g}x",
        f"{run.reached:.1f}x",
        f"{median:,.0f}",
        f"{(most - least) / median:.0%}" if len(row.runs) > 1 else "one run",
        f"{row.bound:.2f}x",
        "" if row.own_bound is None else f"{row.own_bound:.2f}x",
        f"{run.mean_batch:.1f}",
        f"{run.most_batch}",
        f"{run.preemptions}",
        f"{run.rounds}",
        format_bytes(run.kv_bytes_peak),
    )


def _accuracy(row: Row) -> str:
    accuracy = row.first.accuracy
    return "" if accuracy is None else f"{accuracy:.2f}"
