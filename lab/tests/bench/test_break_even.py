"""The break-even of copying and computing again, and a measurement on a tiny model."""

from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from winnow import LLM
from winnow_lab.bench.preemption import Point, Preempted, break_even, preemption_table


def point(length: int, swap: float, recompute: float) -> Point:
    return Point(length, 0, swap, recompute, None, None)


def test_break_even_is_where_the_lines_meet() -> None:
    points = [point(n, 1.0 + 0.001 * n, 0.003 * n) for n in (100, 200, 1000, 2000)]
    assert break_even(points) == pytest.approx(500)
    assert break_even(points[2:]) == 0.0
    assert break_even([point(100, 2.0, 1.0), point(200, 4.0, 2.0)]) is None


def test_a_request_is_preempted_in_both_ways(tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path, seed=1)
    with LLM(directory, kv_memory="8MiB", kv_offloading_size="8MiB", enable_prefix_caching=False) as llm:
        found = Preempted(llm).measure(100, 2)
        stats = llm.stats()
        llm.check_integrity()
    assert stats.num_swaps == 2 and stats.recomputed_tokens >= 200
    assert found.nbytes == stats.swap_bytes_out // 2 == stats.swap_bytes_in // 2
    assert found.swap_seconds > 0 and found.recompute_seconds > 0
    assert found.expected_swap is not None and found.expected_recompute is not None


def test_the_table_ends_with_the_break_even() -> None:
    points = [point(n, 1.0 + 0.001 * n, 0.003 * n) for n in (100, 1000)]
    table = preemption_table(points)
    assert table.rows[1] == ("1,000", ("0 B", "2000.00", "-", "3000.00", "-", "1.5"))
    assert table.notes == ("copying is cheaper from 500 tokens on",)
    assert preemption_table(points[1:]).notes == ("copying is cheaper at every length",)
    assert preemption_table([point(9, 2.0, 1.0)]).notes == ("copying is never cheaper here",)
