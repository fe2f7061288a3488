"""What the papers' machines did, fitted: how near, pinned so that a change of the model of time is seen."""

import statistics

import pytest

from winnow_lab.papers.plan.baton import mixed_queries, refilled_work, static_work
from winnow_lab.papers.plan.command import PAPERS
from winnow_lab.papers.plan.kv_compress import fitted_ranking, kv_compress_run
from winnow_lab.plan.occupancy import Request
from winnow_lab.report.tables import TextTable


def errors(table: TextTable) -> list[float]:
    return [float(entries[2].rstrip("%")) / 100 for _, entries in table.rows]


def test_kcache_rows_are_within_13_percent() -> None:
    found = errors(PAPERS["kcache"]())
    assert len(found) == 10 + 3 * 13
    assert max(map(abs, found)) <= 0.13
    assert statistics.fmean(map(abs, found)) <= 0.06


def test_batch_max_rows_are_within_24_percent_with_the_rounds_of_algorithm_1() -> None:
    table = PAPERS["batch-max"]()
    found = errors(table)
    assert max(map(abs, found)) <= 0.24
    assert statistics.fmean(map(abs, found)) <= 0.08
    # 1,024 of 3,000 tokens at once, then 64 after each round, and one for every 64 of 512 new ones: 31 + 8
    assert any("b=32 kv=1024, 39 rounds" in label for label, _ in table.rows)


def test_baton_rows_are_within_12_percent() -> None:
    assert max(map(abs, errors(PAPERS["baton"]()))) <= 0.12


def test_kv_compress_on_the_l4_is_within_8_percent_of_a_row_that_fitted_nothing() -> None:
    ranking = fitted_ranking(kv_compress_run("L4", 6000, None).seconds)
    assert 5e-8 < ranking < 1e-7
    base, found = (kv_compress_run("L4", 500, rate, ranking).seconds for rate in (None, 4))
    assert base / found == pytest.approx(2.54, rel=0.08)


def test_refilling_computes_no_more_steps_and_equal_answers_gain_nothing() -> None:
    equal = [Request(100, 50)] * 8
    static, refilled = static_work(equal, 4), refilled_work(equal, 4)
    # Those that join are prefilled one by one.
    assert refilled.steps - 8 == static.steps - 2 == 2 * 50
    assert refilled.samples == static.samples == 8 * 50
    mixed = mixed_queries(0, 1)
    static, refilled = static_work(mixed, 4), refilled_work(mixed, 4)
    assert refilled.samples == sum(each.new_tokens for each in mixed)
    assert refilled.steps < 0.6 * static.steps
