"""The record of accuracy: shares of the full cache's score by model, policy, compression and task.

    python -m winnow_lab.real.known

writes src/winnow/cli/known_accuracy.json and docs/results/known.md from docs/results. To add rows, copy the
results.json of `winnow eval TASK ... -o DIR` to docs/results/known_NAME.json and run it again.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from winnow.cli.known_accuracy import DEMO, FILE, PAGE
from winnow.eviction import PRESETS
from winnow.report.provenance import device_name
from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.cell import FULL_CELL
from winnow_lab.real.rows import MIN_SCORE, Row, counts
from winnow_lab.real.tables import share_of_full
from winnow_lab.report import standard_error
from winnow_lab.report.tables import TextTable
from winnow_lab.study.index import PAGES

RESULTS = ROOT / "docs" / "results"
# Pages of real models, and what their tasks are called besides.
REAL = {
    "real": "",
    "real_4k": "",
    "real_documents": "",
    "keys": ", five needles",
    "keys_seen": ", five needles",
}
PAYOFF = ("payoff", "payoff_gemma")
_QUESTION = {"aware": "seen", "agnostic": "later"}
# Work of the payoff page: task, and when its questions come.
_WORKS = {
    "p1": ("needles, answers of 512 tokens", "aware"),
    "p2": ("documents, many questions", "agnostic"),
    "p3": ("chat about texts", "aware"),
}
_QUANTIZED = re.compile(r"(\.Q\d\w*)?(\.gguf)?$")


def known_rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy, compression, way of asking and task of a result, over categories that count."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    if "works" in report:
        model, rows, least = report["works"][0]["model"], list(_payoff_rows(report)), 0.4
    elif "cells" in report:
        model, rows, least = report["model"], list(_eval_rows(report)), MIN_SCORE
    else:
        model, command = report["model"], report["command"]
        rows = [(_task(row["work"]) + REAL[name], Row(**row)) for row in report["rows"]]
        typed = [float(after) for flag, after in pairwise(command) if flag == "--counts-from"]
        [least] = typed or [MIN_SCORE]
    full = {row.work: row for _, row in rows if row.cell == FULL_CELL.name}
    cells: dict[tuple[str, str, float, str], list[Row]] = {}
    for task, row in rows:
        counted = row.score is not None and counts(full[row.work], least)
        if counted and row.query is not None and row.compression is not None and " " not in row.method:
            cells.setdefault((row.method, row.query, row.compression, task), []).append(row)
    for (policy, query, compression, task), found in cells.items():
        share, error = share_of_full(found, full)
        yield {
            "policy": policy,
            "compression": compression,
            "question": _QUESTION[query],
            "share": round(share, 3),
            "error": round(error, 3),
            "model": DEMO if model == "the demo model" else _QUANTIZED.sub("", Path(model).name),
            "task": task,
            "categories": len(found),
            "source": PAGE if "cells" in report else f"docs/results/{PAGES[name].file}",
        }


def _task(work: str) -> str:
    return f"{work.split()[0]} {work.split()[-1]}"


def _payoff_rows(report: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    for work in report["works"]:
        crowded = work["work"] == "p3" and work["kv_seqs"] < work["workload"]["requests"]
        if work["work"] not in _WORKS or crowded:
            continue
        task, query = _WORKS[work["work"]]
        for each in (each for each in work["configurations"] if each["peer"] == "winnow"):
            cell, scores = each["configuration"], each["scores"]
            if cell == FULL_CELL.name:
                yield task, _row(task, cell, "full", None, 1.0, scores)
            elif found := re.fullmatch(r"([\w-]+) (\d+)x", cell):
                yield task, _row(task, cell, found[1], query, float(found[2]), scores)


def _eval_rows(report: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    task = f"{report['task']} {','.join(map(str, report['settings']['tokens']))}"
    for cell in report["cells"]:
        asked = cell["preset"], cell["query"], cell["compression"]
        name = f"{cell['query']} {cell['preset']} {cell['compression']}" if cell["query"] else FULL_CELL.name
        for category, scores in cell["scores"].items():
            yield task, _row(category, name, *asked, scores)


def _row(
    work: str, cell: str, method: str, query: str | None, compression: float, scores: list[float]
) -> Row:
    mean, error, number = fmean(scores), standard_error(scores), len(scores)
    return Row(work, cell, method, query, compression, mean, error, number, number, None, None)


def rows() -> list[dict[str, Any]]:
    """Every row of a policy that there is, of the results that are named here and of those called known_*.json."""
    added = sorted(path.stem for path in RESULTS.glob("known_*.json"))
    return [row for name in (*REAL, *PAYOFF, *added) for row in known_rows(name) if row["policy"] in PRESETS]


def text(found: list[dict[str, Any]]) -> str:
    lines = ",\n".join(f"  {json.dumps(row)}" for row in found)
    return f'{{"written_by": "python -m winnow_lab.real.known", "rows": [\n{lines}\n]}}\n'


_HEAD = """\
# Accuracy of policies, as measured

Shares of the full cache's mean score, over categories that the model can answer, and the standard
error. `winnow plan`, `winnow policies` and `--compression auto` read this record, and so does the
warning of a task below .8; `python -m winnow_lab.real.known` writes it.
"""


def page(found: list[dict[str, Any]]) -> str:
    order = sorted(
        found, key=lambda row: (row["model"], row["question"], row["task"], row["policy"], row["compression"])
    )
    lines = []
    for row in order:
        file = Path(row["source"]).name
        source = "below" if row["source"] == PAGE else f"[{file.rpartition('#')[2]}]({file})"
        judged = f"{row['share']:.2f} ± {row['error']:.2f} | question {row['question']}"
        begun = f"{row['policy']} {row['compression']:g}x | {judged}"
        lines.append(f"{begun} | {row['task']} | {row['model']} | {source}")
    head = " | of full | judged with | task, tokens | model | page"
    table = TextTable.read("What is known", head, lines, words=(1, 2, 3, 4))
    sources = []
    for path in sorted(RESULTS.glob("known_*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        command, machine = " ".join(report["command"]), device_name(report["machine"])
        sources.append(
            f"- [{path.name}]({path.name}): `{command}`\n  (commit {report['commit']}, {report['date'][:10]}, "
            f"{machine}; {report['prompts_per_cell']} prompts a cell)"
        )
    return "\n".join([_HEAD, *table.markdown(), *sources, ""])


if __name__ == "__main__":
    FILE.write_text(text(rows()), encoding="utf-8")
    (ROOT / PAGE).write_text(page(rows()), encoding="utf-8")
