"""The page of one card: parts follow each other, and one that fails says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow_lab import seeds
from winnow_lab.checkout import ROOT
from winnow_lab.study import run_study


def failing(options: seeds.Options) -> Iterator[tuple[str, seeds.Row]]:
    """A part."""
    yield "first", {"tokens/s": "1"}
    raise ConfigError("no room")


def test_parts_follow_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seeds, "PARTS", (failing, seeds.batching, seeds.value_tier))
    words = [
        "--device",
        "cpu",
        "--small",
        "--model",
        str(ROOT / "src/winnow/models/demo"),
        "-o",
        str(tmp_path),
    ]
    assert run_study(seeds.Options, seeds.study, words) == 0
    page = (tmp_path / "seeds_small.md").read_text()
    assert "| first | 1 |" in page and "Failed: no room" in page
    assert "| embedding |" in page and "1.00x |" in page and "host:L=1,N=64 |" in page
    assert "Device cpu; demo, and toy shapes." in capsys.readouterr().out
