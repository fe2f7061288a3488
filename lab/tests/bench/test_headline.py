"""The headline's grid: cells resume, and losses are paired and claimed only beyond their error."""

from pathlib import Path

import pytest

from winnow_lab.checkout import ROOT
from winnow_lab.papers.headline import FULL, Journal, Line, Options, study
from winnow_lab.study import run_study


def test_cells_are_measured_once_and_shown_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(ROOT / "src/winnow/models/demo"), "--contexts", "500", "--compressions", "4"]
    words += ["--methods", "kv-compress", "--kinds", "niah_single_1", "--prompts", "8", "--new-tokens", "20"]
    words += ["--requests", "2", "--kv-seqs", "1", "--rounds", "1", "-o", str(tmp_path)]
    words += ["--journal", str(tmp_path / "rows.jsonl")]
    for part in ("answers", "speed", "page"):
        assert run_study(Options, study, [*words, "--part", part]) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 2, "a header, and a cell of each policy for each part"
    assert run_study(Options, study, [*words, "--part", "answers"]) == 0
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == lines
    page = (tmp_path / "headline.md").read_text()
    assert "| full cache | 8 |" in page and "| kv-compress 4x | 8 |" in page
    capsys.readouterr()
    with pytest.raises(SystemExit, match="other work: seed"):
        run_study(Options, study, [*words, "--seed", "1"])


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1, 1, 0, 0], "-50.0 ± 28.9"),
        ([1, 1, 1, 0], "equal, -25.0 ± 25.0"),
        ([1, 1, 1, 1], "equal, +0.0 ± 0.0"),
    ],
)
def test_equal_is_said_within_one_standard_error(tmp_path: Path, ours: list[float], said: str) -> None:
    options = Options(model="m", kinds=("vt",), contexts=(2000,), prompts=8)
    journal = Journal(tmp_path / "rows.jsonl", {})
    journal.add(f"answers/2000/{FULL}/1/vt/0", {"scores": [1, 1, 1, 1], "reached": 1.0})
    journal.add("answers/2000/winnow-seen/8/vt/0", {"scores": ours, "reached": 8.0})
    full = Line.of(options, journal, 2000, FULL, 1.0)
    assert Line.of(options, journal, 2000, "winnow-seen", 8.0, full=full).lost == said
