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
    lines, notes, rows = [], Footnotes(), report["configurations"]
    whole = (row["median"] for row in rows if (row["peer"], row["configuration"]) == ("winnow", "full cache"))
    base = next(whole, None)
    judged = any(row.get("accuracy") is not None for row in rows)
    for row in rows:
        begun = f"{row['peer']}, {row['configuration']} | {row['kv_memory']}"
        if row["median"] is None:
            failed = notes.mark(str(row["error"]).splitlines()[-1])
            lines.append(f"{begun} | none {failed} | | " + " | " * judged)
            continue
        rates = row["output_tokens_per_second"]
        spread = f"{min(rates):.0f}-{max(rates):.0f}" if len(rates) > 1 else ""
        ratio = f"{row['median'] / base:.2f}" if base else ""
        accuracy = f" | {row['accuracy']:.0%}" if judged else ""
        lines.append(f"{begun} | {row['median']:.0f} | {spread} | {ratio}{accuracy}")
    head = "engine | KV memory | tokens/s | least-most | to full cache" + " | right answers" * judged
    rounds = max(len(row["seconds"]) for row in rows)
    fact = f"{report['summary']}; {f'medians of {rounds} rounds' if rounds > 1 else 'one round'}."
    facts = (fact, *versions(report), *notes.lines())
    return TextTable.read("W1: a Llama of 107 million random parameters", head, lines, facts, words=(0,))


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
