"""What makes two runs the same."""

from pathlib import Path

import pytest

from winnow.errors import UnsupportedModelError
from winnow.process.digest import model_digest
from winnow.report.fingerprint import differences, fingerprint


def test_the_model_is_known_by_its_files(tmp_path: Path, model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    weights.write_bytes(bytes(3 * 2**20))
    before = model_digest(model_dir)
    moved = model_dir.rename(tmp_path / "moved")
    assert model_digest(moved) == before
    for change in ([0], [-1], range(0, 3 * 2**20, 2**16)):
        text = bytearray(3 * 2**20)
        for place in change:
            text[place] = 1
        (moved / "model.safetensors").write_bytes(text)
        assert model_digest(moved) != before
    (moved / "model.safetensors").write_bytes(bytes(3 * 2**20 + 1))
    assert model_digest(moved) != before


def test_a_small_file_counts_by_every_byte(model_dir: Path) -> None:
    before = model_digest(model_dir)
    (model_dir / "config.json").write_text("[]")
    assert model_digest(model_dir) != before


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"directory with a config\.json"):
        fingerprint("abc", tmp_path, {})


def test_differences_are_told_in_words() -> None:
    theirs = {"input": "a", "model": "b", "n": 1, "stop": ["x"]}
    ours = {"input": "c", "model": "d", "n": 1, "stop": ["y"], "top_k": 3}
    shown = differences(theirs, ours)
    assert shown.refused == (
        "the prompts have changed",
        "the model's files differ",
        "stop was ['x'] and is ['y']",
        "top_k was None and is 3",
    )
    assert shown.noted == ()
