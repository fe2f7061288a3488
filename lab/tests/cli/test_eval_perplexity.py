"""`winnow eval perplexity` on the demo model: table, files, and resuming after a stop."""

import json
from pathlib import Path

import pytest

from winnow.cli.main import main

SMALL = ["eval", "perplexity", "--tokens", "48", "--windows", "2", "--progress", "off"]
CELLS = ["--eviction", "recent,snapkv", "--compression", "4"]


def test_a_table_and_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *CELLS, "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "perplexity of 24 tokens after 24" in printed and "full cache" in printed and "recent 4x" in printed
    )
    found = json.loads((tmp_path / "results.json").read_text())
    full, recent, snapkv = found["cells"]
    assert (full["tokens"], recent["tokens"]) == (48, 48)
    assert full["mean_kept"] == 47 and recent["mean_kept"] == 7
    assert 1 < full["perplexity"] < recent["perplexity"]
    assert "smaller than the protected set" in snapkv["refused"]
    assert "recent 4x" in (tmp_path / "results.md").read_text()


def test_a_stopped_measurement_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *CELLS, "-o", str(tmp_path)]) == 0
    journal, results = tmp_path / "windows.jsonl", tmp_path / "results.json"
    lines, first = journal.read_bytes().splitlines(keepends=True), json.loads(results.read_text())
    assert len(lines) == 1 + 4
    # As if the process had been killed: one window is there, half of another, and the one that is there is known by a
    # mark to have been read, not computed again.
    marked = json.loads(lines[1]) | {"nats": 1000.0}
    journal.write_bytes(lines[0] + json.dumps(marked).encode() + b"\n" + lines[2][:20])
    assert main([*SMALL, *CELLS, "-o", str(tmp_path)]) == 0
    again = json.loads(results.read_text())
    assert again["cells"][0]["windows"][marked["window"]]["nats"] == 1000.0
    assert again["cells"][1] == first["cells"][1]
    capsys.readouterr()
    assert main([*SMALL, "--context", "20", "-o", str(tmp_path)]) == 2
    assert "the prompts have changed" in capsys.readouterr().err
    assert main([*SMALL, "--context", "20", "-o", str(tmp_path), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "64", "--context", "64"], "--context must be below --tokens (64), got 64"),
        (["--data", "nowhere"], "--data must be a directory, got 'nowhere'"),
        (["--eviction", "snapvk"], "no eviction preset 'snapvk'"),
        (["--overwrite"], "--overwrite needs -o DIR"),
    ],
)
def test_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "perplexity", *arguments]) == 2
    assert message in capsys.readouterr().err
