"""`winnow pack` writes a model that other commands take."""

from pathlib import Path

import pytest

pytest.importorskip("winnow._native")
from winnow.cli.main import main

pytestmark = pytest.mark.cpu


def test_pack_and_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "packed"
    assert main(["pack", str(packed)]) == 0
    assert capsys.readouterr().out.startswith(f"{packed}: ")
    words = [
        "generate",
        "--model",
        "demo",
        "Question: Where is Mary?",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
    ]
    assert main(words) == 0
    expected = capsys.readouterr().out
    assert main([*words, "--model", str(packed)]) == 0
    assert capsys.readouterr().out == expected != ""


def test_a_directory_in_use_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    assert main(["pack", str(tmp_path)]) == 2
    assert "must be new or empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
