"""The command line of the papers' experiments."""

import pytest

from winnow.cli.main import main as winnow
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
