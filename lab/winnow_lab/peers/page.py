"""Tables of a comparison, from its numbers."""

from collections.abc import Mapping
from typing import Any

from winnow_lab.report.tables import Footnotes, TextTable

Report = Mapping[str, Any]
NOTES = (
    "Every run is a process of its own, in turn with the others; loading and "
    "a first tiny request are not in the time. "
    "KV memory is that of the stated number of whole sequences, the longest, in 16 bits a "
    "number: narrower KVs hold more in the same bytes, and Winnow's policies at 4x hold a quarter of a sequence. "
    "Ratios are to Winnow's full cache. Prefix caches are off, but for Winnow's in W1, whose prompts share nothing. "
    "Versions of everything in a peer's environment are in `lab/winnow_lab/peers/requirements/`.\n"
)


def comparison(report: Report) -> TextTable:
    """Output tokens per second of every row of run.py's report, with the share of right answers where it has one."""
    rows, notes = [], Footnotes()
    base = _median(report, "winnow", "full cache")
    judged = any(row.get("accuracy") is not None for row in report["configurations"])
    for row in report["configurations"]:
        name = f"{row['peer']}, {row['configuration']}"
        if row["median"] is None:
            error = str(row["error"]).splitlines()[-1]
            rows.append((name, (row["kv_memory"], f"none {notes.mark(error)}", "", "", *([""] * judged))))
            continue
        rates = row["output_tokens_per_second"]
        spread = f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else ""
        ratio = "" if base is None else f"{row['median'] / base:.2f}"
        accuracy = [f"{row['accuracy']:.0%}"] if judged else []
        rows.append((name, (row["kv_memory"], f"{row['median']:.0f}", spread, ratio, *accuracy)))
    columns = ["KV memory", "tokens/s", "least-most", "to full cache", *(["right answers"] * judged)]
    rounds = max(len(row["seconds"]) for row in report["configurations"])
    facts = (
        f"{report['summary']}; medians of {rounds} rounds."
        if rounds > 1
        else f"{report['summary']}; one round."
    )
    return TextTable(
        "W1: a Llama of 107 million random parameters",
        "engine",
        tuple(columns),
        tuple(rows),
        (facts, *versions(report), *notes.lines()),
        words=(0,),
    )


def _median(report: Report, peer: str, configuration: str) -> float | None:
    found = (
        row["median"]
        for row in report["configurations"]
        if (row["peer"], row["configuration"]) == (peer, configuration)
    )
    return next(found, None)


def versions(report: Report) -> list[str]:
    """Of the engines, each once."""
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
