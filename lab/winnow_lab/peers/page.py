"""The page of results from the JSON files that run.py and served.py wrote.

python lab/winnow_lab/peers/page.py docs/results/peers.md docs/results/w1_peers_zen5.json ...
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.report.provenance import device_name
from winnow_lab.report.tables import Footnotes, TextTable

Report = Mapping[str, Any]
TITLES = {
    "w1": "W1: a Llama of 107 million random parameters",
}
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
        TITLES[report["work"]],
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


def main(argv: Sequence[str]) -> None:
    """Write the page."""
    out, *files = map(Path, argv)
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    lines = ["# Winnow beside other engines", "", NOTES]
    for file, report in zip(files, reports, strict=True):
        table = comparison(report)
        command, machine = shlex.join(report["command"]), report["machine"]
        lines += [*table.markdown(), f"- command: `{command}`"]
        lines += [f"- {device_name(machine)}, torch {machine['torch_version']}"]
        lines += [f"- numbers as measured: [{file.name}]({file.name})", ""]
    out.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
