"""`winnow eval` as a user types it, with the demo model."""

import json
from pathlib import Path

import pytest

from winnow.cli.main import main
from winnow_lab.evaluate.tasks import TASKS

SMALL = (
    "eval",
    "needle",
    "--samples",
    "1",
    "--tokens",
    "160",
    "--categories",
    "depth-0,depth-50",
    "--progress",
    "off",
)


def test_tables_files_and_a_second_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "needle"
    command = [*SMALL, "--eviction", "snapkv", "--compression", "1,2", "--query", "agnostic", "-o", str(out)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "needle, query-agnostic (judged before the question): mean score" in shown
    assert "snapkv" in shown
    assert "recent (control)" in shown
    assert "commit" in shown
    data = json.loads((out / "results.json").read_text())
    assert [(cell["preset"], cell["compression"], cell["query"]) for cell in data["cells"]] == [
        ("full", 1.0, None),
        ("snapkv", 2.0, "agnostic"),
        ("recent", 2.0, "agnostic"),
        ("random", 2.0, "agnostic"),
    ]
    assert data["query"] == "agnostic"
    assert data["settings"]["seed"] == 0
    assert data["engine"]["kv_floor"] == 1
    assert {"command", "commit", "machine", "date", "model"} <= set(data)
    assert "query-agnostic" in (out / "results.md").read_text()
    journal = (out / "outcomes.jsonl").read_bytes()

    assert main(command) == 0
    assert (out / "outcomes.jsonl").read_bytes() == journal
    assert json.loads((out / "results.json").read_text())["cells"] == data["cells"]
    assert capsys.readouterr().out.splitlines()[2:] == shown.splitlines()[2:]  # the second has the time

    assert main([*command, "--seed", "1"]) == 2
    printed = capsys.readouterr().err
    assert "holds an evaluation with other settings" in printed
    assert "seed was 0 and is 1" in printed
    assert "--overwrite" in printed
    assert main([*command, "--seed", "1", "--overwrite"]) == 0


def test_progress_names_the_cell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.cli.screen.progress.PLAIN_SECONDS", 0.0)
    assert main([*SMALL[:-1], "plain"]) == 0
    printed = capsys.readouterr()
    assert "0/2 done" in printed.err
    assert "full cache | prefill" in printed.err
    assert "needle, full cache" in printed.out


ERRORS = [
    ("eval nedle", "invalid choice: 'nedle'; did you mean needle? Known: demo"),
    ("eval", "the following arguments are required: TASK"),
    ("eval needle --eviction snapvk", "no eviction preset 'snapvk'; did you mean snapkv? Known: full"),
    ("eval needle --eviction ,", "argument --eviction: invalid str list value: ','"),
    ("eval needle --control recnt --eviction snapkv", "no eviction preset 'recnt'; did you mean recent?"),
    ("eval needle --categories depth-5", "task needle has no category 'depth-5'; did you mean depth-50?"),
    ("eval needle --compression 0.5", "--compression must be at least 1, got 0.5"),
    ("eval needle --kv-budget 128,0", "--kv-budget must be at least 1, got 0"),
    ("eval needle --compression 2;4", "argument --compression: invalid float list value: '2;4'"),
    ("eval needle --samples 0", "--samples must be at least 1, got 0"),
    ("eval needle --tokens 12,x", "argument --tokens: invalid int list value: '12,x'"),
    ("eval needle --tokens 0", "--tokens must be at least 1, got 0"),
    ("eval needle --tokens 12", "--tokens 12 leaves no room"),
    ("eval needle --query yes", "argument --query: invalid choice: 'yes'; Known: aware, agnostic, both"),
    ("eval needle --data nowhere", "--data must be a directory, got 'nowhere'"),
    ("eval needle --overwrite", "--overwrite needs -o DIR"),
    (f"eval needle -o {__file__}", f"-o must be a directory, got the file {__file__!r}"),
    ("eval needle --compresion 2", "unknown argument '--compresion'; did you mean --compression?"),
    ("eval needle --model nowhere", "model must be a directory"),
]


@pytest.mark.parametrize(("command", "message"), ERRORS)
def test_mistakes_are_named(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert bool(printed.out) is (command == "eval"), "alone, it lists the tasks"


@pytest.mark.parametrize("task", TASKS)
def test_help_teaches(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", task, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "--compression A,B,..." in printed
    assert "--kv-memory" in printed
    assert "categories:" in printed
    # Flags of the engine that cells or tasks replace.
    assert printed.count("--eviction") == printed.count("--seed ") == 1


def test_reuse_is_measured_on_prompts_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story, other = (
        "".join(f"The {each} of number {n} is red. " for n in range(16)) for each in ("box", "jar")
    )
    file = tmp_path / "asked.jsonl"
    asked = [story + other, other + story, "Read: " + story + other]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in asked))
    words = ["eval", "reuse", "--prompts", str(file), "--max-tokens", "8", "--dtype", "float32"]
    for share, exact in (("1", True), ("0", False)):
        assert main([*words, "--reuse-share", share]) == 0
        [whole, reused] = [
            line.split("│")[1:-1]
            for line in capsys.readouterr().out.splitlines()
            if line.startswith(("│ whole", "│ anywhere"))
        ]
        assert whole[2].strip() == "100%" and whole[4].strip() == "0%"
        assert (reused[2].strip() == "100%") >= exact and (reused[4].strip() == "0%") == exact
        assert (reused[3] == whole[3]) == exact, "nats"
    assert main([*words, "--reuse", "exact"]) == 2
    file.write_text('{"prompt": 3}')
    assert main(words) == 2 and "asked.jsonl, line 1" in capsys.readouterr().err
