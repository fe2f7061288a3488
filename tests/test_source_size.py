"""The source stays within its budget, and the repository without large files."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import source_size

LIMIT = 500_000
# Weights that are part of the wheel, and prompts of 1,000 to 4,000 tokens.
LARGE = {"src/winnow/models/demo/model.safetensors", "examples/demo/prompts.jsonl"}


def test_each_distribution_is_within_its_budget() -> None:
    budget = tomllib.loads(source_size.BUDGET.read_text(encoding="utf-8"))["lines"]
    assert set(budget) == set(source_size.SOURCES)
    assert not source_size.over(source_size.count(), budget)


def test_what_is_over_its_budget_is_named(tmp_path: Path) -> None:
    names = ("src/winnow/cache/deep/a.py", "src/winnow/b.py", "lab/winnow_lab/c.py", "native/kernels/d.cpp")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n2\n")
    found = source_size.count(tmp_path)
    assert found["src/winnow"] == {"src/winnow/cache": 2, "src/winnow": 2}
    named = source_size.over(found, {"src/winnow": 3, "lab/winnow_lab": 2, "native": 1})
    assert [text.split(",")[0] for text in named] == ["src/winnow has 4 lines", "native has 2 lines"]


def test_no_new_file_is_large() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607
        cwd=source_size.ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("needs a checkout: git clone")
    paths = [source_size.ROOT / name for name in listed.stdout.split("\0") if name]
    large = {
        str(path.relative_to(source_size.ROOT)): path.stat().st_size
        for path in paths
        if path.is_file() and path.stat().st_size > LIMIT
    }
    assert set(large) <= LARGE, f"over {LIMIT:,} bytes: {large}"
