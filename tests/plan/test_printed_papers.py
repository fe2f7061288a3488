"""What the papers' machines did, predicted: how near, pinned so that a change of the model of time is seen."""

import statistics

import pytest

from winnow.plan.occupancy import Request
from winnow.plan.papers import PAPERS
from winnow.plan.papers.baton import _baton_times, _mixed, refilled_seconds, static_seconds
from winnow.plan.papers.kv_compress import kv_compress_seconds
from winnow.report.tables import TextTable


def errors(table: TextTable) -> list[float]:
    return [float(entries[2].rstrip("%")) / 100 for _, entries in table.rows]


def test_kcache_rows_are_within_13_percent() -> None:
    found = errors(PAPERS["kcache"]())
    assert len(found) == 10 + 3 * 13
    assert max(map(abs, found)) <= 0.13
    assert statistics.fmean(map(abs, found)) <= 0.06


def test_batch_max_gains_are_within_30_percent() -> None:
    assert max(map(abs, errors(PAPERS["batch-max"]()))) <= 0.30


def test_kv_compress_on_the_l4_is_within_12_percent() -> None:
    base = kv_compress_seconds("L4", 500, None)
    for rate, printed in ((2, 2.0), (4, 2.54)):
        assert base / kv_compress_seconds("L4", 500, rate) == pytest.approx(printed, rel=0.12)


def test_refilling_is_never_slower_and_equal_answers_gain_nothing() -> None:
    times = _baton_times("RTX-4090")
    equal = [Request(100, 50)] * 8
    static, refilled = (f(times, equal, 4) for f in (static_seconds, refilled_seconds))
    assert refilled == pytest.approx(static, rel=0.1)
    mixed = _mixed(0, 1)[:24]
    assert refilled_seconds(times, mixed, 4) < static_seconds(times, mixed, 4)
