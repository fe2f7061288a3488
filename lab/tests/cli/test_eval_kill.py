"""`kill -9` in the middle of `winnow eval`, and the same command again: the table of an undisturbed run."""

import json
import signal
import time
from pathlib import Path

import pytest
from forked import start

from winnow.cli.main import main

# A prompt of each of four categories, in three cells.
OUTCOMES = 4 * 3
COMMAND = (
    *("eval", "demo", "--samples", "1", "--tokens", "320", "--eviction", "snapkv", "--compression", "2,4"),
    *("--query", "agnostic", "--control", "none", "--max-num-seqs", "2", "--progress", "off"),
    *("--categories", "single,two-hop,passkey,code"),
)


def outcomes(directory: Path) -> list[tuple[str, str, int]]:
    """Cell, sample and question of every whole line of the journal after its header."""
    journal = directory / "outcomes.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)[1:] if journal.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [(row["cell"], row["sample"], row["question"]) for row in rows]


def test_a_killed_evaluation_goes_on(
    tmp_path: Path, command_env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start([*COMMAND, "-o", str(killed)], command_env)
    while process.is_alive() and len(outcomes(killed)) < OUTCOMES // 4:
        time.sleep(0.005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left_behind = outcomes(killed)
    assert OUTCOMES // 4 <= len(left_behind) < OUTCOMES

    tables = []
    for directory in (killed, whole):
        assert main([*COMMAND, "-o", str(directory)]) == 0
        tables.append(
            capsys.readouterr().out.splitlines()[2:]
        )  # the first lines have the directory and the time
    assert tables[0] == tables[1]
    assert outcomes(killed)[: len(left_behind)] == left_behind
    assert sorted(outcomes(killed)) == sorted(outcomes(whole)) == sorted(set(outcomes(whole)))
    assert len(outcomes(whole)) == OUTCOMES
    cells = [json.loads((directory / "results.json").read_text())["cells"] for directory in (killed, whole)]
    assert cells[0] == cells[1]
