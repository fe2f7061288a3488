"""`winnow fit` writes a predictor that runs take, and says what is wrong before it works."""

from pathlib import Path

import pytest

from winnow.cli.main import main
from winnow.eviction.predictor import Predictor
from winnow.models.load.loader import DEMO_MODEL

QUICK = ("--tokens", "64", "--max-texts", "4", "--epochs", "1", "--hidden", "4", "--kv-memory", "64MiB")


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["fit", *argv]) == 2
    return capsys.readouterr().err


def test_fit_writes_what_it_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scores.safetensors"
    link = tmp_path / "link"
    link.symlink_to(out)
    assert main(["fit", str(DEMO_MODEL), "-o", str(link), *QUICK]) == 0
    printed = capsys.readouterr()
    assert "text 4 of 4" in printed.err
    assert "of what KVzip keeps" in printed.out
    assert str(link) in printed.out and link.is_symlink()
    link.unlink()
    notes = Predictor.load(out).notes
    assert notes["texts"] == 4
    assert 0.0 <= notes["held_out"]["recall_4x"] <= 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["scores.safetensors"]


def test_fit_learns_a_linear_function_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "scores.safetensors"
    text.write_text(" ".join(f"Item {i} weighs {i * i} grams." for i in range(80)))
    argv = ["fit", str(DEMO_MODEL), str(text), "-o", str(out), *QUICK, "--hidden", "0", "--no-chat"]
    assert main(argv) == 0
    assert "of what KVzip keeps" in capsys.readouterr().out
    assert Predictor.load(out).inner_bias.shape[-1] == 0


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["no-such-model"], "model must be a directory"),
        ([str(DEMO_MODEL), "no-such.txt"], "TEXTS: there is no file no-such.txt"),
        ([str(DEMO_MODEL), "--tokens", "5"], "tokens must be at least 64"),
        ([str(DEMO_MODEL), "--max-texts", "1"], "max_texts must be at least 2"),
        ([str(DEMO_MODEL), "-o", "/dev/null/scores"], "cannot write --out"),
        (["org/name"], "--out is needed"),
    ],
)
def test_what_is_wrong_is_said_first(argv: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert match in refusal(capsys, *argv)


def test_out_may_not_be_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("kept")
    assert "must not be" in refusal(capsys, str(DEMO_MODEL), str(text), "-o", str(text))
    assert text.read_text() == "kept"


def test_too_little_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hardly a text.")
    out = tmp_path / "scores.safetensors"
    assert "at least 2 pieces" in refusal(capsys, str(DEMO_MODEL), str(text), "-o", str(out), *QUICK)
    assert not out.exists()
