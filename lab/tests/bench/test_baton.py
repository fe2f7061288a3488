"""The BATON bench: its queries, its arithmetic, and what it measures."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tiny_llama import save_tiny_llama

from winnow.errors import ConfigError
from winnow_lab.papers.__main__ import main
from winnow_lab.papers.baton.protocol import (
    MIXED,
    MODES,
    PAGED,
    SHORT,
    Cell,
    Lengths,
    Options,
    Run,
    Trace,
    draw_lengths,
    published_gain,
    with_text,
)
from winnow_lab.papers.baton.results import Row, differing_lines, figures, read_rows, spread_lines
from winnow_lab.study.journal import CellJournal

TALLY = {"passes": 100, "positions": 400, "idle": 100, "columns_held": 60, "columns_needed": 40}
TALLY |= {"prefill_seconds": 1.0, "decode_seconds": 3.0}
RUN = Run(
    seconds=8.0,
    answer_tokens=202,
    prompt_tokens=50,
    steps=102,
    kv_bytes_peak=2**20,
    tally=TALLY,
    digests=("a", "b"),
    trace=Trace((1.0, 8.0), (0, 2), (50, 202), (2**20, 2**19)),
)


def rows_of(*cells: tuple[Any, ...]) -> list[Row]:
    """Rows of (mode, seconds, set, batch, fields of the run) by default of the mixed set at batch 8."""
    journal = CellJournal(None, {})
    for mode, seconds, *rest in cells:
        query_set, batch, own = [*rest, *(MIXED, 8, {})[len(rest) :]]
        journal.add(Cell(query_set, mode, batch).key, asdict(replace(RUN, seconds=seconds, **own)))
    return read_rows(journal)


# -- queries ---------------------------------------------------------------------------------------------------------


def test_the_mixed_set_is_the_papers() -> None:
    lengths = draw_lengths(MIXED, 8, 1.0, seed=3)
    assert len(lengths) == 120
    long_in = [each for each in lengths if each.prompt > 400]
    long_out = [each for each in lengths if each.answer > 400]
    short = [each for each in lengths if each.total <= 800]
    assert (len(long_in), len(long_out), len(short)) == (30, 30, 60)
    assert all(3600 <= each.prompt <= 4400 and 24 <= each.answer <= 400 for each in long_in)
    assert all(3600 <= each.answer <= 4400 and 24 <= each.prompt <= 400 for each in long_out)
    assert lengths != sorted(lengths, key=lambda each: each.total)
    doubled = draw_lengths(MIXED, 4, 1.0, seed=3)
    assert doubled == [Lengths(2 * each.prompt, 2 * each.answer) for each in lengths]


def test_the_short_set_is_the_papers() -> None:
    lengths = draw_lengths(SHORT, 4, 1.0, seed=0)
    assert len(lengths) == 30 and lengths == draw_lengths(SHORT, 8, 1.0, seed=0)
    assert all(24 <= tokens <= 200 for each in lengths for tokens in (each.prompt, each.answer))
    assert 80 < fmean(each.answer for each in lengths) < 144
    assert lengths != draw_lengths(SHORT, 4, 1.0, seed=1)
    assert {each.total for each in draw_lengths(SHORT, 4, 1e-9, seed=0)} == {4}


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5), st.integers(0, 9), st.booleans())
def test_prompts_are_passages_of_the_text(prompts: list[int], seed: int, begins: bool) -> None:
    text, first = list(range(100, 115)), 7 if begins else None
    queries = with_text([Lengths(each, 3) for each in prompts], text, first, seed)
    for tokens, query in zip(prompts, queries, strict=True):
        assert len(query.token_ids) == tokens and query.answer_tokens == 3
        passage = query.token_ids[begins:]
        assert not begins or query.token_ids[0] == 7
        assert all(after == 100 + (before - 99) % 15 for before, after in itertools.pairwise(passage))


def test_a_trace_gives_lengths_and_arrivals(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        *(f"2023-11-16 18:00:0{second}.0,{8 * second},{second}" for second in (1, 2, 5)),
    ]
    trace.write_text("\n".join(lines))
    options = Options(sets=("trace",), trace=trace, short_scale=0.5, rate=2.0)
    [cell, *_] = options.cells()
    assert options.lengths(cell) == [Lengths(4, 2), Lengths(8, 2), Lengths(20, 2)]
    assert options.arrivals(cell, 3) == pytest.approx([0, 0.375, 1.5]), "three queries in 1.5 seconds"
    assert Options(sets=("trace",), trace=trace).arrivals(cell, 3) == []
    for wrong in ({"sets": ("trace",)}, {"trace": trace}):
        with pytest.raises(ConfigError, match="--trace FILE"):
            Options(**wrong)


# -- cells and arithmetic --------------------------------------------------------------------------------------------


def test_cells_that_are_compared_stand_together() -> None:
    cells = list(Options(modes=("static", "embedding")).cells())
    assert cells[:3] == [Cell(MIXED, "static", 4), Cell(MIXED, "embedding", 4), Cell(MIXED, "static", 8)]
    assert [cell.batch for cell in cells if cell.query_set == SHORT] == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert {cell.batch for cell in Options(batches=(3,)).cells()} == {3}
    assert Options(sets=("short", "short")).sets == ("short",)
    assert [Cell.of(cell.key) for cell in cells] == cells


def test_options_of_padded_engines_are_not_given_to_the_paged_one() -> None:
    given = {"dtype": "bfloat16"}
    padded = {**given, "engine": "padded:mode=pd,prefill_group=4", "max_num_seqs": 2}
    assert Cell(SHORT, "pd", 2).options(given, "prefill_group=4") == padded
    paged = {"dtype": "bfloat16", "engine": "paged", "max_num_seqs": 2}
    assert Cell(SHORT, PAGED, 2).options(given, "prefill_group=4") == paged


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--sets long", "--sets: no 'long'"),
        ("--modes static,orca", "--modes: no 'orca'"),
        ("--batches 0", "--batches must be at least 1, got 0"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--query-seed -1", "--query-seed must be at least 0, got -1"),
        ("--scale 0", "--scale must be a number above 0, got 0"),
        ("--short-scale inf", "--short-scale must be a number above 0, got inf"),
    ],
)
def test_cells_that_cannot_be_measured_are_refused(
    typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["baton", *typed.split()]) == 2
    assert message in capsys.readouterr().err


def test_rows_compare_medians_passes_and_answers_with_static() -> None:
    fewer = TALLY | {"passes": 40}
    other = MIXED, 8, {"tally": fewer, "digests": ("a", "x")}
    rows = rows_of(
        ("static", 8.0),
        *(("embedding", seconds, *other) for seconds in (2.0, 4.0, 8.0)),
        (PAGED, 1.0, MIXED, 8, {"tally": {}}),
        ("shaping", 5.0, SHORT, 2),
    )
    static, embedding, paged, lonely = rows
    assert (embedding.seconds, embedding.gain, embedding.spread) == (4.0, 2.0, 1.5)
    assert embedding.pass_gain == 2.5
    assert (static.differing, embedding.differing, lonely.differing) == (0, 1, None)
    assert (embedding.first.idle_share, embedding.first.column_share) == (0.25, 1.5)
    assert (paged.pass_gain, paged.first.idle_share, paged.first.column_share) == (None, None, None)
    assert (lonely.gain, lonely.pass_gain) == (None, None)
    assert differing_lines(rows) == ["mixed, batch 8, embedding: 1 of 2 answers differ from static's."]
    assert "same tokens" in differing_lines([static])[0]
    assert "run 1 to 3 times" in spread_lines(rows)[0] and "150%" in spread_lines(rows)[0]
    assert spread_lines([static]) == ["Each cell was run once."]


def test_the_papers_gains() -> None:
    assert published_gain(MIXED, "embedding", 8) == pytest.approx(2.494, abs=1e-3)
    assert published_gain(SHORT, "embedding", 10) == pytest.approx(1.31, abs=1e-2)
    assert published_gain(SHORT, "pd", 8) is None and published_gain(MIXED, "static", 2) is None
    assert published_gain(MIXED, "shaping", 4) is None, "the paper has no shaping without gaps"


def test_figures_have_a_panel_for_each_batch() -> None:
    drawn = figures(rows_of(("static", 8.0, MIXED, 2), ("embedding", 5.0)))
    assert list(drawn) == ["_figure5", "_figure6", "_figure7"]
    titles = [axes.get_title() for axes in drawn["_figure7"]().axes]
    assert titles[:2] == ["mixed set, batch 2", "mixed set, batch 8"]


def test_runs_survive_json() -> None:
    [row] = rows_of(("static", 8.0))
    again = Run.from_json(json.loads(json.dumps(asdict(row.first) | {"commit": "abc"})))
    assert again.trace.tokens == [50, 202] and again.seconds == 8.0
    assert row.to_json()["idle_share"] == 0.25


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("baton") / "model", seed=0, num_hidden_layers=1)


def test_all_modes_answer_alike_and_only_static_ones_compute_without_need(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal"
    typed = f"baton --model {model} --batches 5 --scale 0.006 --short-scale 0.05 --journal {journal} -o {tmp_path}"
    assert main([*typed.split(), "--sets", "mixed", "--padded", "group_padding=0.1"]) == 0
    first = json.loads((tmp_path / "baton.json").read_text())["rows"]
    rows = {row["mode"]: row for row in first}
    assert set(rows) == set(MODES)
    assert {row["differing"] for row in rows.values()} == {0}
    assert rows["embedding"]["idle_share"] < 0.1 < rows["shaping"]["idle_share"]
    assert rows["static"]["idle_share"] > 0.3
    assert rows["shaping-gaps"]["pass_gain"] == rows["shaping"]["pass_gain"]
    assert rows["shaping-gaps"]["column_share"] > 1.2 > 1.05 > rows["shaping"]["column_share"]
    assert rows["embedding"]["pass_gain"] > 1.75 and rows["embedding"]["sustained_gain"] > 1
    assert rows["embedding"]["column_share"] < 1.05 < rows["static"]["column_share"]
    for row in map(json.loads, journal.read_text().splitlines()[1:]):
        lengths, trace = Options(scale=0.006).lengths(Cell.of(row["cell"])), row["trace"]
        assert row["answer_tokens"] == sum(length.answer for length in lengths) == trace["tokens"][-1]
        assert row["prompt_tokens"] == sum(length.prompt for length in lengths)
        assert trace["completed"][-1] == 120 and trace["seconds"] == sorted(trace["seconds"])
        assert 0 < max(trace["kv_bytes"]) <= row["kv_bytes_peak"]
    capsys.readouterr()
    # The journal has all of it, and the other set resumes there.
    assert main([*typed.split(), "--padded", "group_padding=0.1", "--modes", "static,embedding"]) == 0
    again = json.loads((tmp_path / "baton.json").read_text())["rows"]
    assert again[:6] == first and len(again) == 8
    shown = capsys.readouterr().out
    assert "All modes gave the same tokens" in shown and "Table 2" in shown
    page = (tmp_path / "baton.md").read_text()
    assert "baton_figure5.svg" in page and "| 5, paged |" in page
    assert main(typed.split()) != 0  # other options: other runs
    assert "group_padding" in capsys.readouterr().err
