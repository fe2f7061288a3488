"""Every example runs as it stands and prints something."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: one of its own takes five seconds and more to import torch and transformers.
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
