"""The command line of the papers' experiments."""

import shutil
from pathlib import Path

import pytest
from refusals import check_refused

from winnow.cli.main import main as winnow
from winnow.models.load.loader import DEMO_MODEL
from winnow_lab.papers.__main__ import STUDIES, main


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_help(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a study's own flags stand beside those of the engine."""
    with pytest.raises(SystemExit) as stop:
        main([study, "--help", "all"])
    assert stop.value.code == 0
    error = capsys.readouterr().out
    assert error.startswith(f"usage: python -m winnow_lab.papers {study} [options]")
    assert error.count("\n  --threads N") == (study != "plan"), "which runs nothing"


def test_winnow_bench_says_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        winnow(["bench", "--help"])
    assert "python -m winnow_lab.papers --help" in capsys.readouterr().out
    assert winnow(["bench", "baton"]) == 2


def test_what_is_read_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one file that is written over another one."""
    model, page = tmp_path / "model", tmp_path / "page"
    model.mkdir()
    page.mkdir()
    shutil.copyfile(DEMO_MODEL / "config.json", model / "config.json")
    monkeypatch.chdir(tmp_path)
    commands = {
        "baton --json model/config.json --model model": "--json must not be a file of --model",
        "kv-compress --json page/kv_compress.md --out page": "--json and the page of --out must not be",
        "kv-compress --json x --out model --model model": "--out must not be --model",
        "h2h --journal model --model model": "--journal must not be --model",
    }
    check_refused(main, commands, tmp_path, capsys)
