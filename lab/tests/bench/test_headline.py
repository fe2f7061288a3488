"""The headline's grid: methods by name, cells that resume, losses paired and claimed only beyond their error."""

import json
from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow.eviction import PRESETS
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.checkout import ROOT
from winnow_lab.evaluate.variants import VARIANTS
from winnow_lab.papers.headline import FULL, Cell, Line, Options, engine_of, study
from winnow_lab.study import run_study
from winnow_lab.study.journal import CellJournal


def test_cells_are_measured_once_and_shown_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(ROOT / "src/winnow/models/demo"), "--task", "demo", "--kinds", "single"]
    words += ["--contexts", "500", "--prompts", "8", "--new-tokens", "8", "--requests", "2", "--kv-seqs", "1"]
    words += ["--methods", "snapkv-w8:kv_cache_dtype=int8,extreme-decode-65", "--rounds", "1"]
    words += ["--compressions", "4", "--kv-budgets", "128", "-o", str(tmp_path)]
    words += ["--journal", str(tmp_path / "rows.jsonl")]
    for part in ("answers", "speed", "page"):
        assert run_study(Options, study, [*words, "--part", part]) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4, "a header, and both parts of each cell"
    assert run_study(Options, study, [*words, "--part", "answers"]) == 0
    assert (tmp_path / "rows.jsonl").read_text().splitlines() == lines
    page, evicting = (tmp_path / "headline.md").read_text(), "snapkv-w8:kv_cache_dtype=int8"
    for cell in ("full", f"{evicting} 4x", f"{evicting} 128 KVs", "extreme-decode-65"):
        assert f"| {cell} | 8 |" in page
    mixed = [*words, "--contexts", "500,600", "--mixed", "--methods", FULL, "--part", "speed"]
    assert run_study(Options, study, mixed) == 0
    apart = [*words, "--contexts", "500,600", "--methods", FULL, "--part", "speed"]
    assert run_study(Options, study, apart) == 0
    *before, mixed_row, first, second = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert before == lines and '"speed/600/500+600/full"' in mixed_row
    assert '"speed/600/500/full"' in first and '"speed/600/600/full"' in second
    pools = {json.loads(row)["kv_memory"] for row in (mixed_row, first, second)}
    assert len(pools) == 1, "one pool for all contexts"
    # Batch-Max's batches: memory of two sequences of 508, so that 4 do not fit; 128 KVs of each and 64 more fit 4.
    static = [
        *words,
        "--static",
        "--methods",
        "extreme-decode,batch-max",
        "--kv-budgets",
        "192",
        "--part",
        "speed",
    ]
    static += ["--requests", "4", "--kv-seqs", "2", "--journal", str(tmp_path / "static.jsonl")]
    assert run_study(Options, study, [*static, "--compressions", ""]) == 0
    batches = {
        row["cell"]: row["most"]
        for row in map(json.loads, (tmp_path / "static.jsonl").open())
        if "cell" in row
    }
    assert batches == {
        "speed/500-static/500/full": 2,
        "speed/500-static/500/extreme-decode": 2,
        "speed/500-static/500/batch-max 192 KVs": 4,
    }
    capsys.readouterr()
    with pytest.raises(SystemExit, match="other work: seed"):
        run_study(Options, study, [*words, "--seed", "1"])


def test_methods_are_presets_variants_and_options() -> None:
    assert engine_of("kv-compress") == {"eviction": "kv-compress", "pool": "text"}
    assert engine_of("kv-compress:pool=7")["pool"] == 7
    assert engine_of("winnow-keys-pd:kv_cache_dtype=int8:kv_floor=1") == {
        "eviction": "winnow-keys-pd", "kv_cache_dtype": "int8", "kv_floor": 1,
    }  # fmt: skip
    assert engine_of("snapkv-w8:pool=text") == {"eviction": VARIANTS["snapkv-w8"], "pool": "text"}
    options = Options(
        model="m", methods=("batch-max", "extreme-decode"), compressions=(2.0,), kv_budgets=(64,)
    )
    amounts = [Cell("batch-max", Amount(2.0)), Cell("batch-max", Amount(kv_budget=64))]
    assert options.cells == [Cell(FULL), *amounts, Cell("extreme-decode", OWN_AMOUNT)]
    assert not PRESETS.keys() & VARIANTS.keys()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("kv-compres", "did you mean kv-compress"),
        ("snapkv:pol=7", "unrecognized arguments: --pol=7"),
        ("snapkv:pool=seven", "pool must be"),
        ("int8:kv_cache_dtype=int9", "int9"),
    ],
)
def test_methods_that_mean_nothing_are_refused_by_name(method: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--methods {method}: .*{message}"):
        Options(model="m", methods=(method,))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1, 1, 0, 0], "-50.0 ± 28.9"),
        ([1, 1, 1, 0], "equal, -25.0 ± 25.0"),
        ([1, 1, 1, 1], "equal, +0.0 ± 0.0"),
    ],
)
def test_equal_is_said_within_one_standard_error(ours: list[float], said: str) -> None:
    options = Options(model="m", kinds=("vt",), contexts=(2000,), prompts=8)
    journal, cell = CellJournal(None, {}), Cell("winnow-seen", Amount(8.0))
    journal.add("answers/2000/full/vt/0", {"scores": [1, 1, 1, 1], "reached": 1.0})
    journal.add("answers/2000/winnow-seen 8x/vt/0", {"scores": ours, "reached": 8.0})
    full = Line.of(options, journal, "2000", Cell(FULL))
    assert Line.of(options, journal, "2000", cell, full).lost == said


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([2.0, 2.0, 4.0], "0.50x [0.25-0.50]"),
        ([0.5, 2.0, 0.8], "equal, 1.25x [0.50-2.00]"),
        ([0.5], "2.00x, one round"),
    ],
)
def test_gains_are_of_rounds_in_turn_and_equal_where_these_disagree(ours: list[float], said: str) -> None:
    options = Options(model="m", kinds=("vt",), contexts=(2000,), prompts=8)
    journal, cell = CellJournal(None, {}), Cell("winnow-seen", Amount(8.0))
    for seconds in ours:
        journal.add("speed/2000/2000/full", {"seconds": 1.0, "tokens": 100, "scores": [1]})
        journal.add("speed/2000/2000/winnow-seen 8x", {"seconds": seconds, "tokens": 100, "scores": [1]})
    full = Line.of(options, journal, "2000", Cell(FULL))
    assert Line.of(options, journal, "2000", cell, full).gained == said
