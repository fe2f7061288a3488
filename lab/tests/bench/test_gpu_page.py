"""The page about a GPU: without one a line and a code; on toy shapes its parts run, and end in time."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from winnow_lab.gpu.__main__ import main
from winnow_lab.gpu.rows import page, read_rows

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, its parts in theirs: exit code, output, errors."""

    def command(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return command


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU: make test")
def test_without_a_gpu_it_says_so(run: Run) -> None:
    code, out, errors = run()
    [line] = errors.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("winnow_lab.gpu: torch ") and "finds no GPU" in line


def test_a_model_runs_on_toy_shapes(run: Run) -> None:
    code, shown, errors = run("--device", "cpu", "--part", "1b")
    assert code == 0, errors
    rows = read_rows(shown.splitlines())
    assert [row["unit"] for row in rows] == ["tokens/s", "ms", "ms"]
    assert all(row["value"] > 0 for row in rows) and "decode step of 4" in shown


def test_rows_of_a_part_are_what_its_process_prints(run: Run, tmp_path: Path) -> None:
    out, python = tmp_path / "gpu.json", tmp_path / "python"
    row = """{"name": "'"$*"'", "value": 4, "unit": "ms"}"""
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] || echo '{row}'\n")
    python.chmod(0o755)
    words = ("--device", "cpu", "--parts", "vllm", "--vllm-python", str(python), "-o", str(out))
    code, shown, errors = run(*words)
    assert code == 0, errors
    [row] = json.loads(out.read_text())["parts"]["vllm"]
    assert row["name"] == "-m winnow_lab.gpu --part vllm --device cpu" in shown


def test_what_takes_too_long_is_cut_off(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    code, shown, errors = run("--device", "cpu", "--parts", "limits", "--minutes", "0.1", "-o", str(out))
    assert code == 1 and "limits (cut off after 1 s)" in shown, errors


def test_rows_stand_beside_the_limits() -> None:
    limits = [
        {"name": "read", "value": 2.0, "unit": "TB/s"},
        {"name": "product, 16 bits", "value": 500.0, "unit": "TFLOP/s"},
    ]
    printed = [
        "a library's word",
        '{"else": 1}',
        json.dumps({"name": "decode", "value": 4, "unit": "ms", "bytes": 2e9}),
    ]
    found = page(
        {"device": "card"},
        {"limits": limits, "attention": read_rows(printed), "vllm": []},
        {"vllm": "absent"},
    )
    assert "decode     4.000 ms   limit 1.000, 25 %" in found
    assert "vllm (absent)" in found and "library" not in found
