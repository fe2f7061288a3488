"""The study of host time: a step that every sequence decodes in, and its parts."""

import json
from pathlib import Path

from winnow_lab.speed.host_time import PARTS, Options, study
from winnow_lab.study import run_study


def test_parts_make_up_a_step(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    words = ["--layers", "2", "--kv-heads", "2", "--sequences", "2,9", "--prompt", "8", "--steps", "12"]
    assert run_study(Options, study, [*words, "--kv-memory", "16MiB", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["seconds"]
    assert [*found] == ["2", "9"]
    for row in found.values():
        assert all(0 < row[part] < row["step"] for part in PARTS)
        assert sum(row[part] for part in PARTS) > 0.5 * row["step"]
