"""What `winnow plan` says of accuracy: shares of the full cache's score, from results on a real model.

    python -m benchmarks.real_eval.known

writes src/winnow/plan/known_accuracy.json from docs/results.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.real_eval.rows import MIN_SCORE, Row, counts
from benchmarks.real_eval.tables import share_of_full
from winnow.evaluate.cell import FULL_CELL
from winnow.plan.known_accuracy import FILE

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SOURCES = ("real.json", "real_4k.json", "real_documents.json")
_QUESTION = {"aware": "seen", "agnostic": "later"}


def known_rows(file: Path) -> list[dict[str, Any]]:
    """A row for each policy, compression and way of asking, over the categories that count."""
    report = json.loads(file.read_text(encoding="utf-8"))
    command = report["command"]
    least = float(command[command.index("--counts-from") + 1]) if "--counts-from" in command else MIN_SCORE
    rows = [Row(**each) for each in report["rows"]]
    full = {row.work: row for row in rows if row.cell == FULL_CELL.name}
    cells: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        counted = row.score is not None and counts(full[row.work], least)
        if counted and row.query is not None and row.compression is not None and " " not in row.method:
            cells.setdefault((row.method, row.query, row.compression), []).append(row)
    return [
        {
            "policy": policy,
            "compression": compression,
            "question": _QUESTION[query],
            "share": round(share, 3),
            "error": round(error, 3),
            "model": report["model"],
            "tasks": ", ".join(dict.fromkeys(f"{r.work.split()[0]} {r.work.split()[-1]}" for r in found)),
            "categories": len(found),
            "source": f"docs/results/{file.name}",
        }
        for (policy, query, compression), found in cells.items()
        for share, error in [share_of_full(found, full)]
    ]


def text() -> str:
    """The file's content."""
    rows = [row for name in SOURCES for row in known_rows(RESULTS / name)]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"written_by": "python -m benchmarks.real_eval.known", "rows": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
