"""`winnow eval lm-eval` on a task that lies here: table, files, and what is refused."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from winnow.cli.main import main

TASK = """
task: tiny
dataset_path: json
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}} So Bo lives in"
doc_to_choice: ["Oslo", "Rome"]
doc_to_target: 1
metric_list: [{metric: acc}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": "Ada lives in Oslo. Bo lives in Rome."}) + "\n")
    place = {"data_files": {"test": str(documents)}, "cache_dir": str(tmp_path / "cache")}
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "tiny.yaml").write_text(TASK + f"dataset_kwargs: {json.dumps(place)}\n")
    return directory


def test_cells_side_by_side_and_no_cell_twice(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        "eval",
        "lm-eval",
        "--tasks",
        "tiny",
        "--include-path",
        str(tasks),
        "-o",
        str(out),
        "--progress",
        "off",
    ]
    assert main([*command, "--eviction", "recent", "--compression", "8"]) == 0
    printed = capsys.readouterr().out
    assert "tiny acc" in printed and "full cache" in printed and "recent 8x" in printed
    found = json.loads((out / "results.json").read_text())
    assert [each["cell"] for each in found["cells"]] == ["full cache", "recent 8x"]
    assert found["cells"][0]["found"]["results"]["tiny"]["acc,none"] in (0.0, 1.0)
    assert "recent 8x" in (out / "results.md").read_text()
    # Another cell is added to the journal; the first two are read from it.
    journal = (out / "cells.jsonl").read_bytes()
    assert main([*command, "--eviction", "recent", "--compression", "4,8"]) == 0
    assert (out / "cells.jsonl").read_bytes().startswith(journal)
    assert len((out / "cells.jsonl").read_text().splitlines()) == 1 + 3
    # Another task file of that name is another task.
    (tasks / "tiny.yaml").write_text((tasks / "tiny.yaml").read_text().replace("So Bo", "Then Bo"))
    capsys.readouterr()
    assert main(command) == 2
    assert "holds an evaluation with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tasks", "tiny", "--include-path", "nowhere"],
            "--include-path must be a directory, got 'nowhere'",
        ),
        (["--tasks", "tiny", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "a,,b"], "invalid str list value: 'a,,b'"),
        ([], "required: --tasks"),
    ],
)
def test_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "lm-eval", *arguments]) == 2
    assert message in capsys.readouterr().err
