"""The benchmark of oversubscribed prompts, small: every row answers all, and each in its own way."""

import json
from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from winnow_lab.memory.oversubscribed import ROWS, Options, study
from winnow_lab.study import run_study


def test_each_row_is_what_its_name_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, written = save_tiny_llama(tmp_path / "model", seed=1), tmp_path / "out.json"
    sizes = ["--requests", "8", "--prompt", "80", "--answer", "64", "--fits", "3"]
    run_study(Options, study, ["--model", str(model), *sizes, "--json", str(written)])
    assert "8 prompts of 80 tokens, answers of 64" in capsys.readouterr().out
    report = json.loads(written.read_text())
    rows = {name: measured for name, [measured] in report["rows"].items()}
    assert tuple(rows) == ROWS
    assert rows["prompt"]["preemptions"] == 0 and rows["prompt"]["most_running"] < 3
    assert rows["recompute"]["recomputed"] > 0 == rows["recompute"]["swaps"]
    assert rows["swap"]["preemptions"] > 0
    assert rows["greedy"]["preemptions"] >= rows["recompute"]["preemptions"]
    assert rows["compress"]["rounds"] > 0 and rows["compress at once"]["rounds"] > 0
    assert rows["compress at once"]["running"] > rows["recompute"]["running"]
