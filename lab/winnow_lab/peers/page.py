"""Tables of a comparison and of payoff.py's report, from their numbers alone."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from winnow_lab.report import standard_error
from winnow_lab.report.tables import Footnotes, TextTable

Report = Mapping[str, Any]
Row = Mapping[str, Any]
FULL = "full cache"
W1_NOTES = (
    "Every run is a process of its own, in turn with the others; loading and "
    "a first tiny request are not in the time. "
    "KV memory is that of the stated number of whole sequences, the longest, in 16 bits a "
    "number: narrower KVs hold more in the same bytes, and Winnow's policies at 4x hold a quarter of a sequence. "
    "Ratios are to Winnow's full cache. Prefix caches are off, but for Winnow's in W1, whose prompts share nothing. "
    "Versions of everything in a peer's environment are in `lab/winnow_lab/peers/requirements/`.\n"
)


def comparison(report: Report) -> TextTable:
    """Output tokens per second of every row of run.py's report."""
    lines, notes, rows = [], Footnotes(), report["configurations"]
    whole = (row["median"] for row in rows if (row["peer"], row["configuration"]) == ("winnow", "full cache"))
    base = next(whole, None)
    for row in rows:
        begun = f"{row['peer']}, {row['configuration']} | {row['kv_memory']}"
        if row["median"] is None:
            failed = notes.mark(str(row["error"]).splitlines()[-1])
            lines.append(f"{begun} | none {failed} | | ")
            continue
        rates = row["output_tokens_per_second"]
        spread = f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else ""
        ratio = f"{row['median'] / base:.2f}" if base else ""
        lines.append(f"{begun} | {row['median']:.0f} | {spread} | {ratio}")
    head = "engine | KV memory | tokens/s | least-most | to full cache"
    rounds = max(len(row["seconds"]) for row in rows)
    fact = f"{report['summary']}; {f'medians of {rounds} rounds' if rounds > 1 else 'one round'}."
    facts = (fact, *versions(report), *notes.lines())
    return TextTable.read("W1: a Llama of 107 million random parameters", head, lines, facts, words=(0,))


def versions(report: Report) -> list[str]:
    found = {}
    for row in report["configurations"]:
        first = next(iter(row["versions"].items()), None)
        if first is not None and row["peer"] != "winnow":
            found[row["peer"]] = f"{first[0]} {first[1]}"
    commits = sorted({commit for row in report["configurations"] for commit in row["commits"]})
    measured = sorted(date[:10] for row in report["configurations"] for date in row["dates"])
    when = f" Measured {measured[0]}." if measured else ""
    measured_with = "; ".join([f"Winnow at {', '.join(commits)}", *found.values()])
    return [f"{measured_with}.{when}"]


NOTES = (
    "Every run is a process of its own, in turn with the others; loading and a first tiny request are not in the time. "
    "KV memory is that of the stated number of whole sequences, the longest, in 16 bits a number: what is narrower or "
    "compressed holds more in the same bytes. Ratios are of seconds, Winnow's full cache over the row: above 1 is "
    "faster. Right answers: mean score and its standard error. CPU seconds are user and system time of the answering "
    "alone. Prompts alone: answers of one token.\n"
)


def tables(report: Report) -> list[TextTable]:
    return [table(work, _work(report, work["model"], f"{work['work']}, few")) for work in report["works"]]


def table(work: Report, few: Report | None) -> TextTable:
    """All rows of a work; `few`: the same with fewer questions of each context."""
    full, notes, lines = _full(work), Footnotes(), []
    head = f"engine | KV memory | tokens/s | least-most | seconds | to {FULL} | right answers | CPU seconds"
    for row in (
        row for row in work["configurations"] if row["median"] or row["error"]
    ):  # those that were run
        begun = f"{row['peer']}, {row['configuration']} | {row['kv_memory']}"
        if row["median"] is None:
            failed = notes.mark(str(row["error"]).splitlines()[-1])
            lines.append(f"{begun} | none {failed}" + " | " * (6 if few is None else 7))
            continue
        rates, ratio = row["output_tokens_per_second"], _ratio(full, row)
        spread = f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else ""
        speed = f"{row['median']:.0f} | {spread} | {_seconds(row):.1f} | {'' if ratio is None else f'{ratio:.2f}'}"
        used = f"{statistics.median(row['cpu_seconds']):.0f} | {statistics.median(row['output_tokens']):,.0f}"
        pays = "" if few is None else f" | {'' if row is full else _pays_from(work, few, row)}"
        lines.append(f"{begun} | {speed} | {right_answers(row['scores'])} | {used}{pays}")
    facts = [f"{work['summary']}; rounds: {max(len(row['seconds']) for row in work['configurations'])}."]
    if few is not None:
        facts.append(
            "Pays from: questions of one context from which the row takes less time than the full cache."
        )
    head += " | answer tokens" + " | pays from" * (few is not None)
    title = f"{work['model']}, {work['work']}: {work['title']}"
    return TextTable.read(title, head, lines, (*facts, *versions(work), *notes.lines()), (0,))


def right_answers(scores: Sequence[float]) -> str:
    """Mean and standard error in percent."""
    if not scores:
        return ""
    return f"{statistics.fmean(scores):.0%} ± {standard_error(scores) or 0.0:.0%}"


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


def _seconds(row: Row) -> float:
    return statistics.median(row["seconds"])


def _ratio(base: Row | None, row: Row | None) -> float | None:
    return None if base is None or row is None else _seconds(base) / _seconds(row)


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
