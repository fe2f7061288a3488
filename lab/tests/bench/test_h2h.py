"""Presets head to head: what is measured, and how it stands beside the papers."""

import json
from pathlib import Path

import pytest

from winnow.errors import EvaluationError
from winnow.eviction import PRESETS, Window
from winnow.values.eviction_request import OWN_AMOUNT, Amount
from winnow_lab.evaluate.cell import FULL_CELL, Cell
from winnow_lab.evaluate.outcome import Outcome
from winnow_lab.evaluate.perplexity import Perplexity, WindowScore
from winnow_lab.evaluate.result import CellResult, Evaluation
from winnow_lab.papers.__main__ import main
from winnow_lab.papers.h2h.protocol import LONGBENCH, PERPLEXITIES, ROUND_EVERY, Continuations, text_presets
from winnow_lab.papers.h2h.results import longbench_tables, perplexity_table
from winnow_lab.papers.h2h.variants import VARIANTS


def result(cell: Cell, score: float) -> CellResult:
    outcome = Outcome(cell.name, "s", 0, "single", 512, score, "", 500, 2, cell.amount.compression, 100)
    return CellResult(cell, (outcome,))


def evaluation(*results: CellResult) -> Evaluation:
    return Evaluation("demo", ("single",), (512,), 1, ("recent",), (result(FULL_CELL, 0.8), *results))


class TestBesideKvCompress:
    def test_shares_of_the_full_cache_stand_beside_the_papers(self) -> None:
        found = evaluation(
            result(Cell("kv-compress", Amount(4.0), "aware"), 0.6),
            result(Cell("kv-compress", Amount(8.0), "aware"), 0.4),
            result(Cell("snapkv", Amount(8.0), "aware"), 0.2),
            result(Cell("snapkv-w8", Amount(8.0), "aware"), 0.4),
            result(Cell("recent", Amount(4.0), "aware"), 0.0),
            result(Cell("recent", Amount(8.0), "aware"), 0.0),
        )
        table, mistral = longbench_tables(found)
        assert table.columns == (
            "paper, C=128", "paper, C=256", "paper, C=512", "paper, C=1024", "here, 4x", "here, 8x",
        )  # fmt: skip
        assert dict(table.rows) == {
            "SnapKV: snapkv-w8": ("0.910", "0.946", "0.971", "0.987", "-", "0.500"),
            "SnapKV, another window: snapkv": ("0.910", "0.946", "0.971", "0.987", "-", "0.250"),
            "KVC-w8-L2: kv-compress": ("0.937", "0.953", "0.982", "0.994", "0.750", "0.500"),
        }
        assert dict(mistral.rows) == {
            "SnapKV: snapkv": ("0.825", "0.909", "0.947", "0.975", "-", "0.250"),
            "SnapKV, another window: snapkv-w8": ("0.825", "0.909", "0.947", "0.975", "-", "0.500"),
            "KVC-w8-L2: kv-compress": ("0.885", "0.939", "0.969", "0.987", "0.750", "0.500"),
        }

    def test_a_category_that_a_control_answers_counts_nowhere(self) -> None:
        found = evaluation(
            result(Cell("snapkv", Amount(4.0), "aware"), 0.6),
            result(Cell("recent", Amount(4.0), "aware"), 0.8),
        )
        assert not longbench_tables(found)

    def test_budgets_stand_behind_compressions(self) -> None:
        amounts = (Amount(kv_budget=128), Amount(8.0), Amount(kv_budget=512))
        found = evaluation(*(result(Cell("kv-compress", amount, "aware"), 0.4) for amount in amounts))
        assert longbench_tables(found)[0].columns[4:] == ("here, 8x", "here, 512 KVs", "here, 128 KVs")

    def test_query_agnostic_cells_stay_out(self) -> None:
        assert not longbench_tables(evaluation(result(Cell("snapkv", Amount(4.0), "agnostic"), 0.6)))


def test_published_rows_name_policies_that_exist() -> None:
    methods = [method for table in LONGBENCH for method in table.methods]
    assert {each.preset for each in (*methods, *PERPLEXITIES)} <= PRESETS.keys() | VARIANTS.keys()
    assert {each.also for each in methods} - {None} <= PRESETS.keys() | VARIANTS.keys()


def test_table_1_stands_beside_presets_of_its_own_window() -> None:
    """Section 5.1: w = 8 and p = 7 for all baselines that watch queries."""
    for method in LONGBENCH[0].methods:
        score = Cell(method.preset, OWN_AMOUNT, None, VARIANTS.get(method.preset)).policy.score
        if isinstance(score, Window):
            assert score.pool is not None
            assert (score.size, score.pool.size) == (8, 7), method.preset
    assert PERPLEXITIES[0].preset == "full"
    assert [each.ratio for each in PERPLEXITIES][-1] == pytest.approx(5.19 / 5.12)


class TestContinuations:
    def test_every_policy_has_rounds_while_it_predicts(self) -> None:
        keepings = Continuations(2, 1024).keepings(["full", *text_presets(), "leverage-pd", "batch-max"])
        assert keepings.pop("full").amount.kv_budget is None
        for keeping in keepings.values():
            when = keeping.policy.when
            assert (when.decode_every, when.prefill_every, when.within) == (ROUND_EVERY, None, False)
            assert keeping.amount.kv_budget == 256

    def test_windows_that_hold_no_budget_are_refused(self) -> None:
        with pytest.raises(EvaluationError, match="at least 16 tokens, got 15"):
            Continuations(1, 15)

    def test_each_stands_beside_the_text_and_over_the_full_cache(self) -> None:
        def printed(name: str, *nats: float) -> Perplexity:
            scores = (WindowScore(name, n, each, 10, 32.0, 100, 1) for n, each in enumerate(nats))
            return Perplexity(name, tuple(scores))

        found = [printed("full", 10.0, 20.0), printed("h2o", 11.0, 21.0), printed("winnow", 10.0, 22.0)]
        table = perplexity_table([*found, Perplexity("recent", (), "too small")], Continuations(2, 40))
        rows = dict(table.rows)
        assert rows["full"] == ("full cache", "5.12", "1.000", "4.5", "1.000 +- 0.000", "32")
        assert rows["h2o"] == ("H2O", "5.24", "1.023", "5.0", "1.105 +- 0.000", "32")
        assert rows["winnow"] == ("-", "-", "-", "5.0", "1.105 +- 0.111", "32")
        assert rows["recent"] == ("recent only", "6.41", "1.252", "refused", "-", "-")
        assert table.notes[-1] == "recent: too small"


def test_the_command_and_a_second_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "--presets h2o-once,leverage --compression 4 --samples 1 --tokens 200 --windows 1 --window-tokens 64"
    )
    work = tmp_path / "work"
    command = ["h2h", *small.split(), "--kv-memory", "16MiB"]
    command += ["-o", str(tmp_path), "--journal", str(work)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Share of the full cache's mean score" in shown or "is uninformative" in shown
    data = json.loads((tmp_path / "h2h.json").read_text())
    assert [each["name"] for each in data["perplexity"]] == [*text_presets(), "leverage"]
    assert all(each["windows"][0]["rounds"] >= 2 for each in data["perplexity"][1:])
    page = (tmp_path / "h2h.md").read_text()
    assert "## Perplexity with a quarter of the KVs" in page
    journals = [(work / name).read_bytes() for name in ("outcomes.jsonl", "windows.jsonl")]
    assert main(command) == 0
    assert [(work / name).read_bytes() for name in ("outcomes.jsonl", "windows.jsonl")] == journals


def test_text_alone_needs_no_task(tmp_path: Path) -> None:
    small = "--text-only --presets kv-compress --windows 1 --window-tokens 64 --kv-memory 16MiB"
    assert main(["h2h", *small.split(), "-o", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "h2h_text.json").read_text())
    assert [each["name"] for each in data["perplexity"]] == [*text_presets(), "kv-compress"]
    assert (tmp_path / "h2h_text.md").is_file() and not (tmp_path / "h2h.json").exists()
