"""The page and the chart of payoff.py's report, computed from its numbers alone."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from winnow_lab.peers.configurations import PROMPTS_ALONE
from winnow_lab.peers.page import versions
from winnow_lab.report.plots import Axis, Line, Panel, line_chart
from winnow_lab.report.tables import Footnotes, TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = Mapping[str, Any]
Row = Mapping[str, Any]
FULL = "full cache"
NOTES = (
    "Every run is a process of its own, in turn with the others; loading and a first tiny request are not in the time. "
    "KV memory is that of the stated number of whole sequences, the longest, in 16 bits a number: what is narrower or "
    "compressed holds more in the same bytes. Ratios are of seconds, Winnow's full cache over the row: above 1 is "
    "faster. Right answers: mean score and its standard error; answers count as equal to the full cache's where the "
    "mean of the differences, question by question, is no more than its standard error below zero. CPU seconds are "
    "user and system time of the answering alone. Prompts alone: answers of one token.\n"
)


@dataclass(frozen=True)
class Bar:
    """What was aimed at, and what came; `value` None: nothing was measured that could hold it."""

    model: str
    what: str
    least: float
    value: float | None

    @property
    def holds(self) -> bool:
        """Whether the value reaches the bar."""
        return self.value is not None and self.value >= self.least

    def __str__(self) -> str:
        value = "none" if self.value is None else f"{self.value:.2f}"
        return f"{'holds' if self.holds else 'FAILS'}: {self.model}, {self.what}: {value}, bar {self.least:g}"


def verdict(report: Report) -> str:
    """Say whether the bars hold, and what limits them."""
    found = list(bars(report))
    held = sum(bar.holds for bar in found)
    whether = "All bars hold." if held == len(found) else f"Not all bars hold: {held} of {len(found)} do."
    return " ".join([f"**{whether}**", *_limits(report)])


def tables(report: Report) -> list[TextTable]:
    """Return a table for each work of each model."""
    return [table(work, _work(report, work["model"], f"{work['work']}, few")) for work in report["works"]]


def _limits(report: Report) -> Iterator[str]:
    """Say of each model what its prompts alone leave of p1's bar, and what p2's fastest row loses."""
    for work in report["works"]:
        full = _full(work)
        rows = [row for row in work["configurations"] if row["median"] is not None]
        fastest = _fastest(row for row in rows if row is not full)
        if work["work"] == "p2" and full is not None and fastest is not None and len(_equal(work)) == 1:
            lost = statistics.fmean(full["scores"]) - statistics.fmean(fastest["scores"])
            yield (
                f"For p2 every row that is faster than the full cache loses answers: {fastest['configuration']}, "
                f"{_ratio(full, fastest):.1f} times as fast, {100 * lost:.0f} points fewer right."
            )
        most = _ratio(_full(work), _row(work, "winnow", PROMPTS_ALONE))
        if work["work"] == "p1" and most is not None:
            yield (
                f"On {work['model']} the full cache takes {most:.1f} times as long for p1 as its prompts alone do, so "
                "that no row can reach more."
            )


def bars(report: Report) -> Iterator[Bar]:
    """What each model has to reach in the works that ran: p1's two ratios, p2's, and p3's of `auto`."""
    for model in dict.fromkeys(work["model"] for work in report["works"]):
        seen = _work(report, model, "p1")
        if seen is not None:
            rows = _equal(seen)
            ours = _fastest(row for row in rows if row["peer"] == "winnow" and row is not _full(seen))
            best_peer = _fastest(row for row in rows if row["peer"] != "winnow")
            name = "a row" if ours is None else ours["configuration"]
            beside = "best peer" if best_peer is None else _name(best_peer)
            yield Bar(model, f"p1, {name} to the {FULL}, equal answers", 7.0, _ratio(_full(seen), ours))
            yield Bar(model, f"p1, {name} to {beside}, equal answers", 3.0, _ratio(best_peer, ours))
        later = _work(report, model, "p2")
        if later is not None:
            once = _fastest(row for row in _equal(later) if row is not _full(later))
            name = "a row" if once is None else once["configuration"]
            yield Bar(model, f"p2, {name} to the {FULL}, equal answers", 2.0, _ratio(_full(later), once))
        works = [_work(report, model, name) for name in ("p3", "p3, four")]
        if None in works:
            continue
        autos = [_ratio(_full(work), _row(work, "winnow", "auto")) for work in works]
        least = None if None in autos else min(autos)  # type: ignore[type-var]
        yield Bar(model, f"p3, auto to the {FULL}, the lesser of both", 0.98, least)
        four = next((row for row in _equal(works[1]) if row["configuration"] == "auto"), None)
        yield Bar(
            model, f"p3, auto to the {FULL}, memory for four, equal answers", 1.3, autos[1] if four else None
        )


def table(work: Report, few: Report | None) -> TextTable:
    """All rows of a work; `few`: the same with fewer questions of each context."""
    full, notes, rows = _full(work), Footnotes(), []
    columns = ["KV memory", "tokens/s", "least-most", "seconds", f"to {FULL}", "right answers", "CPU seconds"]
    columns += ["answer tokens", *(["pays from"] if few is not None else [])]
    for row in work["configurations"]:
        if row["median"] is None and row["error"] is None:
            continue  # it was not run
        if row["median"] is None:
            failed = f"none {notes.mark(str(row['error']).splitlines()[-1])}"
            rows.append((_name(row), (row["kv_memory"], failed, *[""] * (len(columns) - 2))))
            continue
        rates, ratio = row["output_tokens_per_second"], _ratio(full, row)
        cells = [
            row["kv_memory"],
            f"{row['median']:.0f}",
            f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else "",
            f"{_seconds(row):.1f}",
            "" if ratio is None else f"{ratio:.2f}",
            right_answers(row["scores"]),
            f"{statistics.median(row['cpu_seconds']):.0f}",
            f"{statistics.median(row['output_tokens']):,.0f}",
        ]
        if few is not None:
            cells.append("" if row is full else _pays_from(work, few, row))
        rows.append((_name(row), tuple(cells)))
    facts = [f"{work['summary']}; rounds: {max(len(row['seconds']) for row in work['configurations'])}."]
    if few is not None:
        facts.append(
            "Pays from: questions of one context from which the row takes less time than the full cache."
        )
    title = f"{work['model']}, {work['work']}: {work['title']}"
    return TextTable(
        title, "engine", tuple(columns), tuple(rows), (*facts, *versions(work), *notes.lines()), (0,)
    )


def right_answers(scores: Sequence[float]) -> str:
    """Mean and standard error in percent."""
    if not scores:
        return ""
    return f"{statistics.fmean(scores):.0%} ± {_standard_error(scores):.0%}"


def has_equal_answers(scores: Sequence[float], full: Sequence[float]) -> bool:
    """Whether answers to the same questions are not worse than the full cache's by more than chance makes them."""
    differences = [mine - other for mine, other in zip(scores, full, strict=True)]
    return bool(differences) and statistics.fmean(differences) >= -_standard_error(differences)


def pays_from(few: int, many: int, full: tuple[float, float], row: tuple[float, float]) -> int | None:
    """Questions of one context from which a row takes less time than the full cache; None: it never does.

    Args:
        few, many: questions of each context in two works.
        full, row: seconds of both works. Seconds grow with questions as a line.
    """
    each_full, each = ((times[1] - times[0]) / (many - few) for times in (full, row))
    more = (row[0] - few * each) - (full[0] - few * each_full)
    if each >= each_full:
        return 1 if more + each < each_full else None
    return max(1, math.floor(more / (each_full - each)) + 1)


def chart(report: Report) -> "Figure | None":
    """Right answers against tokens per second in p1, a panel for each model; amounts of one policy are joined."""
    panels = []
    for work in report["works"]:
        if work["work"] != "p1":
            continue
        lines: dict[str, list[Row]] = {}
        for row in work["configurations"]:
            if row["median"] is not None and row["scores"] and row["configuration"] != PROMPTS_ALONE:
                family = re.sub(r" [0-9]+x$", "", row["configuration"])
                lines.setdefault(f"{row['peer']}, {family}", []).append(row)
        found = [
            Line(
                label,
                [row["median"] for row in rows],
                [100 * statistics.fmean(row["scores"]) for row in rows],
                errors=[100 * _standard_error(row["scores"]) for row in rows],
            )
            for label, rows in lines.items()
        ]
        x = Axis("output tokens per second, KV memory for two sequences", "log")
        panels.append(
            Panel(_finding(work), x, Axis("right answers, % (bars: standard error)", low=0, high=100), found)
        )
    return line_chart(panels) if panels else None


def _finding(work: Report) -> str:
    """Return the figure's title: speed and answers of the policy at 8x beside the full cache."""
    full, ours = _full(work), _row(work, "winnow", "winnow-seen 8x")
    if full is None or ours is None:
        return str(work["model"])
    right, before = (100 * statistics.fmean(row["scores"]) for row in (ours, full))
    gain = f"{ours['median'] / full['median']:.1f} times the\ntokens per second"
    return f"{work['model']}: 8x fewer KVs, {gain}, {right:.0f} % right for {before:.0f} %"


def _work(report: Report, model: str, name: str) -> Report | None:
    return next((each for each in report["works"] if (each["model"], each["work"]) == (model, name)), None)


def _row(work: Report | None, peer: str, configuration: str) -> Row | None:
    rows = [] if work is None else work["configurations"]
    wanted = (peer, configuration)
    return next(
        (r for r in rows if (r["peer"], r["configuration"]) == wanted and r["median"] is not None), None
    )


def _full(work: Report | None) -> Row | None:
    return _row(work, "winnow", FULL)


def _equal(work: Report | None) -> list[Row]:
    full = _full(work)
    if work is None or full is None:
        return []
    ran = [
        row
        for row in work["configurations"]
        if row["median"] is not None and row["configuration"] != PROMPTS_ALONE
    ]
    return [row for row in ran if has_equal_answers(row["scores"], full["scores"])]


def _fastest(rows: Iterator[Row]) -> Row | None:
    return min(rows, key=_seconds, default=None)


def _seconds(row: Row) -> float:
    return statistics.median(row["seconds"])


def _ratio(base: Row | None, row: Row | None) -> float | None:
    return None if base is None or row is None else _seconds(base) / _seconds(row)


def _name(row: Row) -> str:
    return f"{row['peer']}, {row['configuration']}"


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _pays_from(work: Report, few: Report, row: Row) -> str:
    full, full_few = _full(work), _full(few)
    row_few = _row(few, row["peer"], row["configuration"])
    if full is None or full_few is None or row_few is None:
        return ""
    counts = [each["workload"]["requests"] // each["workload"]["contexts"] for each in (few, work)]
    if counts[0] == counts[1]:
        return ""
    times = (_seconds(full_few), _seconds(full)), (_seconds(row_few), _seconds(row))
    found = pays_from(counts[0], counts[1], *times)
    return "never" if found is None else f"{found} questions"
