"""Marks, means, tables and files, from made-up outcomes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from winnow.values.eviction_request import Amount
from winnow_lab.evaluate.cell import FULL_CELL, Cell
from winnow_lab.evaluate.result import CellResult, Evaluation, Outcome, Refusal, uninformative_categories
from winnow_lab.evaluate.result_tables import (
    all_tables,
    category_table,
    length_table,
    mean_table,
    write_report,
)
from winnow_lab.evaluate.tasks.longbench import GROUPS, SUBSETS
from winnow_lab.report.plots import can_draw

CATEGORIES = ("easy", "hard", "hopeless")
SNAPKV, RECENT = Cell("snapkv", Amount(4.0), "agnostic"), Cell("recent", Amount(4.0), "agnostic")
HEAD: dict[str, Any] = {
    "command": ["winnow", "eval", "made up"],
    "commit": "abc",
    "date": "2026-11-21",
    "machine": {"accelerator": None, "cpu": "a processor", "cores": 2, "torch_version": "2"},
    "model": "a model",
}


def result(
    cell: Cell, *scores: float, reached: float | None = 4.0, lengths: tuple[int, ...] = (100,)
) -> CellResult:
    """One outcome for each category and length; `scores` are by category."""
    outcomes = tuple(
        Outcome(cell.name, f"{name}/{length}", 0, name, length, score, "text", 90, 3, reached, 2048)
        for length in lengths
        for name, score in zip(CATEGORIES, scores, strict=True)
    )
    return CellResult(cell, outcomes)


def evaluation(*results: CellResult, lengths: tuple[int, ...] = (100,)) -> Evaluation:
    return Evaluation("made-up", CATEGORIES, lengths, 3 * len(lengths), ("recent",), results)


@pytest.fixture
def compared() -> Evaluation:
    return evaluation(
        result(FULL_CELL, 1.0, 0.8, 0.05, reached=1.0),
        result(SNAPKV, 0.9, 0.4, 0.05, reached=3.0),
        result(RECENT, 0.95, 0.2, 0.0),
    )


def test_what_a_control_answers_as_well_as_the_full_cache_is_marked() -> None:
    full = {"a": 0.8, "b": 0.8, "c": 0.09, "d": 0.1, "e": 0.8}
    recent = {"a": 0.76, "b": 0.7599, "c": 0.0, "d": 0.0, "e": None}
    marks = uninformative_categories(list(full), full.get, {"recent": recent.get})
    assert marks == {"a": "recent scores 0.76, the full cache 0.80", "c": "the full cache itself scores 0.09"}
    assert uninformative_categories(["b"], full.get, {"recent": recent.get, "random": {"b": 0.9}.get}) == {
        "b": "random scores 0.90, the full cache 0.80"
    }
    assert uninformative_categories(["a"], {}.get, {"recent": recent.get}) == {}


def test_headlines_leave_out_what_is_marked(compared: Evaluation) -> None:
    assert list(compared.marks("agnostic", Amount(4.0))) == ["easy", "hopeless"]
    full, snapkv, _ = compared.results
    headline = compared.headline(snapkv, "agnostic", Amount(4.0))
    assert (headline.mean, headline.covered, headline.of) == (0.4, 1, 3)
    # The full cache's mean beside it is over the same categories.
    assert compared.headline(full, "agnostic", Amount(4.0)).mean == 0.8
    # At another compression, or in the other mode, the control says nothing.
    assert (
        list(compared.marks("aware", Amount(4.0)))
        == list(compared.marks("agnostic", Amount(8.0)))
        == ["hopeless"]
    )


def test_no_informative_category_no_mean() -> None:
    same = (1.0, 1.0, 0.0)
    flat = evaluation(result(FULL_CELL, *same), result(RECENT, *same), result(SNAPKV, *same))
    assert flat.headline(flat.results[2], "agnostic", Amount(4.0)).mean is None
    assert ("snapkv", ("-",)) in mean_table(flat, "agnostic").rows


def test_the_means_table(compared: Evaluation) -> None:
    table = mean_table(compared, "agnostic")
    assert "query-agnostic" in table.title
    assert table.columns == ("4x",)
    assert table.rows == (
        ("full cache", ("0.80",)),
        ("snapkv", ("0.40 (at 3.0x)",)),
        ("recent (control)", ("0.20",)),
        ("categories counted", ("1 of 3",)),
    )


def test_errors_stand_beside_means_and_say_how_many_prompts_tell_rows_apart() -> None:
    """Two presets of two categories, of which one is right wherever the other is, and once more."""

    def drawn(cell: Cell, *scores: float) -> CellResult:
        outcomes = result(cell, *scores[:3]).outcomes + result(cell, *scores[3:]).outcomes
        pairs = zip(outcomes, "eeehhh", strict=True)
        named = (replace(each, sample=str(n), category=name) for n, (each, name) in enumerate(pairs))
        return CellResult(cell, tuple(named))

    keydiff = replace(SNAPKV, preset="keydiff")
    better, worse = drawn(SNAPKV, 1, 1, 0, 1, 0, 1), drawn(keydiff, 1, 1, 0, 1, 0, 0)
    found = replace(evaluation(better, worse), categories=("e", "h"), prompts=6)
    # Each category's variance is 1/3 over three answers; the mean is over two categories.
    assert better.error(["e", "h"]) == pytest.approx(math.sqrt(2 * (1 / 3) / 3) / 2)
    table = mean_table(found, "agnostic")
    assert ("snapkv", ("0.67 ± 0.24",)) in table.rows
    # Differences 0, 0, 0, 0, 0, 1: variance 1/6, mean 1/6.
    assert found.prompts_to_tell(better, worse) == 24
    assert "at 4x about 24 prompts tell snapkv and keydiff apart: more than these" in table.notes[0]
    assert dict(category_table(found, "agnostic", Amount(4.0)).rows)["e"] == ("0.67 ± 0.33", "0.67 ± 0.33")


def test_the_table_of_categories(compared: Evaluation) -> None:
    table = category_table(compared, "agnostic", Amount(4.0))
    assert table.columns == ("full cache", "snapkv", "recent (control)")
    rows = dict(table.rows)
    assert rows["easy*"] == ("1.00", "0.90", "0.95")
    assert rows["hard"] == ("0.80", "0.40", "0.20")
    assert rows["mean of 1"] == ("0.80", "0.40", "0.20")
    assert rows["mean of all 3"] == ("0.62", "0.45", "0.38")
    assert list(rows).index("mean of all 3") == list(rows).index("mean of 1") + 1
    assert rows["compression reached"] == ("1.0x", "3.0x", "4.0x")
    assert rows["KV memory of an answer"] == ("2.0 KiB",) * 3
    assert table.notes == (
        "* easy is uninformative: recent scores 0.95, the full cache 1.00",
        "* hopeless is uninformative: the full cache itself scores 0.05",
    )


def test_subsets_of_longbench_have_means_of_their_categories() -> None:
    names = ("qasper", "narrativeqa", "lcc")
    outcomes = tuple(
        replace(each, category=name)
        for each, name in zip(result(FULL_CELL, 0.5, 0.25, 0.125).outcomes, names, strict=True)
    )
    full = CellResult(FULL_CELL, outcomes)
    [table] = all_tables(Evaluation("made-up", names, (100,), 3, (), (full,)))
    rows = dict(table.rows)
    assert rows["one document: mean"] == ("0.38",) and rows["code: mean"] == ("0.12",)
    assert "summaries: mean" not in rows
    assert {name for group in GROUPS.values() for name in group} == set(SUBSETS)


def test_one_mean_where_every_category_is_informative() -> None:
    shown = evaluation(result(FULL_CELL, 1.0, 0.8, 0.5), result(SNAPKV, 0.9, 0.4, 0.2))
    means = [
        name for name, _ in category_table(shown, "agnostic", Amount(4.0)).rows if name.startswith("mean")
    ]
    assert means == ["mean of 3"]


def test_refused_cells_are_told_with_the_reason() -> None:
    refused = CellResult(SNAPKV, (), Refusal("too small", 2))
    shown = evaluation(result(FULL_CELL, 1.0, 0.8, 0.5), refused)
    table = mean_table(shown, "agnostic")
    assert ("snapkv", ("- [1]",)) in table.rows
    assert table.notes == ("[1] refused for 2 of 3 prompts: too small",)
    assert "snapkv [1]" in category_table(shown, "agnostic", Amount(4.0)).columns
    assert shown.to_json()["cells"][1]["refused"] == "too small"


def test_lengths_have_a_table_of_their_own() -> None:
    lengths = (100, 200)
    found = evaluation(
        result(FULL_CELL, 1.0, 0.8, 0.6, lengths=lengths),
        result(SNAPKV, 0.6, 0.3, 0.0, lengths=lengths),
        lengths=lengths,
    )
    table = length_table(found, "agnostic")
    assert table.columns == ("100", "200")
    assert table.rows == (("full cache (of 3)", ("0.80", "0.80")), ("snapkv 4x (of 3)", ("0.30", "0.30")))
    assert table in all_tables(found)


def test_the_full_cache_alone_has_a_table() -> None:
    [table] = all_tables(evaluation(result(FULL_CELL, 1.0, 0.8, 0.05)))
    assert dict(table.rows)["mean of 2"] == ("0.90",)
    assert dict(table.rows)["mean of all 3"] == ("0.62",)
    assert table.notes == ("* hopeless is uninformative: the full cache itself scores 0.05",)


def test_files(compared: Evaluation, tmp_path: Path) -> None:
    paths = write_report(compared, tmp_path, HEAD)
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["command"] == HEAD["command"]
    [_, snapkv, _] = data["cells"]
    assert snapkv["query"] == "agnostic"
    assert snapkv["mean"] == 0.4
    assert snapkv["mean_covers"] == 1
    assert snapkv["plain_mean"] == pytest.approx((0.9 + 0.4 + 0.05) / 3)
    assert set(snapkv["not_discriminating"]) == {"easy", "hopeless"}
    assert snapkv["scores"] == {"easy": [0.9], "hard": [0.4], "hopeless": [0.05]}
    text = (tmp_path / "results.md").read_text()
    assert "    winnow eval 'made up'\n" in text
    assert "| snapkv | 0.40 (at 3.0x) |" in text
    assert "3 prompts per cell; ± is the standard error" in text
    assert "(commit abc; a processor, 2 cores, torch 2; 2026-11-21)" in text
    drawn = {"score.svg"} if can_draw() else set()
    assert {path.name for path in paths} == {"results.json", "results.md"} | drawn
    assert all(path.stat().st_size for path in paths)


def test_maps_of_category_and_length(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lengths = (100, 200)
    found = evaluation(
        result(FULL_CELL, 1.0, 0.8, 0.6, lengths=lengths),
        result(SNAPKV, 0.6, 0.3, 0.0, lengths=lengths),
        lengths=lengths,
    )
    paths = write_report(found, tmp_path, HEAD)
    assert tmp_path / "maps" / "query-agnostic-snapkv-4x.svg" in paths
    assert "(maps/full-cache.svg)" in (tmp_path / "results.md").read_text()


def test_journals_of_older_versions_are_read() -> None:
    """An evaluation of days resumes: journals keep the name that the achieved compression had in them."""
    outcome = Outcome("full cache", "a/1", 0, "a", None, 1.0, "text", 90, 3, 2.5, 2048)
    assert outcome.to_json()["achieved_compression"] == outcome.achieved_compression == 2.5
    assert Outcome.from_json(outcome.to_json()) == outcome
