"""`winnow bench pressure`: a trace played under one setting after the other."""

import json
import re
from pathlib import Path

import pytest

from winnow.cli.main import main
from winnow_lab.bench.pressure import PlayedTrace, pressure_table

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
LINES = [f"2023-11-16 18:15:{46 + i // 10}.{i % 10}000000,{40 + 7 * i},{8 + i}\n" for i in range(6)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "".join(LINES) + "2023-11-16 18:15:59.0000000,90000,8\n", encoding="utf-8")
    return path


def measure(trace: Path, *more: str) -> dict[str, object]:
    written = trace.with_suffix(".json")
    scale = ["--token-scale", "1", "--rate", "1000", "--json", str(written), "--kv-memory", "4MiB"]
    assert main(["bench", "pressure", str(trace), *scale, *more]) == 0
    report: dict[str, object] = json.loads(written.read_text(encoding="utf-8"))
    return report


def test_watermarks_side_by_side(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = measure(trace, "--watermarks", "0.5,1", "--max-model-len", "400")
    shown = capsys.readouterr().out
    assert "trace.csv by watermark" in shown and "preemptions/min" in shown
    assert "6 requests" in shown and "less those longer than the model's context" in shown
    played = report["replays"]
    assert isinstance(played, list)
    assert [each["name"] for each in played] == ["50%", "100%"]
    for each in played:
        assert each["counted"]["generated_tokens"] == sum(8 + i for i in range(6))
        assert len(each["latencies"]) == 6 - each["refused"]
    assert played[0]["most_running"] <= played[1]["most_running"]


def test_other_sweeps(trace: Path) -> None:
    for sweep, names in (
        ("prefix-cache", ["prefix cache off", "prefix cache on"]),
        ("reservation", ["max", "prompt", "on-demand", "on-demand + prefix cache"]),
    ):
        played = measure(trace, "--sweep", sweep, "--requests", "2", "--max-model-len", "300")["replays"]
        assert isinstance(played, list)
        assert [each["name"] for each in played] == names


def test_the_sweep_of_preemption_ends_with_the_break_even(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--sweep", "preemption", "--requests", "2", "--max-model-len", "300", "--lengths", "32,64,4096")
    report = measure(trace, *more)
    shown = capsys.readouterr().out
    assert "One preemption by length" in shown and "copying is" in shown
    assert [each["name"] for each in report["replays"]] == ["recompute", "swap"]
    points = report["preemptions"]
    assert isinstance(points, list) and [each["length"] for each in points] == [32, 64]
    assert all(each["swap_seconds"] > 0 and each["recompute_seconds"] > 0 for each in points)
    assert "break_even" in report


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--watermark-high", "0.5"], "--watermark-high is what --sweep watermark changes"),
        (["--watermarks", "0.5,2"], "watermarks must be at most 1.0, got 2.0"),
        (["--token-scale", "0"], "--token-scale must be at least"),
        (["--sweep", "x"], "--sweep: invalid choice: 'x'"),
        (["--token-scale", "1000"], "no request of .* has at most"),
    ],
)
def test_mistakes_are_told_at_once(
    trace: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pressure", str(trace), *more]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_trace_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pressure", str(tmp_path)]) == 2
    assert "TRACE must be a file" in capsys.readouterr().err


def test_the_table_has_a_line_per_setting() -> None:
    counted = {"generated_tokens": 120, "num_preemptions": 3, "prompt_tokens": 700}
    played = [PlayedTrace(name, 30.0, 1, (1, 3), (2.0, 4.0), (1.0,), counted) for name in ("70%", "98%")]
    table = pressure_table(played, "t", "watermark", ()).transposed()
    assert table.rows[0] == ("70%", ("2.0", "3", "4.0", "6.0", "700", "1.00", "1.00", "3.00", "3.98", "1"))
