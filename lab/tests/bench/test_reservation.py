"""lab/winnow_lab/memory/reservation.py measures what the paper's table says of contiguous caches."""

import runpy
from pathlib import Path

import pytest

from winnow_lab.checkout import ROOT
from winnow_lab.memory.reservation import (
    WORKLOADS,
    Options,
    Workload,
    allocators,
    lengths,
    measure,
    of_trace,
    split,
    tiny_llama,
)


@pytest.mark.parametrize("workload", WORKLOADS[:2], ids=lambda workload: workload.name)
def test_the_more_is_reserved_the_more_is_wasted(tmp_path: Path, workload: Workload) -> None:
    tiny_llama(tmp_path, 256)
    arguments = Options(requests=8, scale=16, seqs=2, seed=0)
    found = {mode: measure(tmp_path, workload, mode, arguments) for mode in ("max", "prompt", "on-demand")}
    mean, longest = sum(lengths(workload, 8, 16, 0)) / 8, workload.max_len // 16
    assert mean / longest == pytest.approx(workload.mean_len / workload.max_len, abs=0.03)
    # The last token of an answer is never computed, nor is what its last step brings.
    assert found["max"].at_end == pytest.approx(1 - (mean - 1) / longest, abs=0.02)
    assert found["max"].at_end == pytest.approx(workload.waste, abs=0.03)
    assert found["max"].at_end > found["prompt"].at_end > found["on-demand"].at_end
    assert found["max"].internal > found["prompt"].internal > found["on-demand"].internal
    assert found["on-demand"].internal < 0.05
    assert found["max"].running <= found["prompt"].running <= found["on-demand"].running
    assert found["max"].running <= 2


def test_a_trace_brings_its_own_lengths(tmp_path: Path) -> None:
    lines = "".join(f"2023-11-16 18:15:4{i}.0000000,{40 * (i + 1)},{8 + i}\n" for i in range(6))
    file = tmp_path / "trace.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines, encoding="utf-8")
    workload = of_trace(file, 250)
    assert workload.sizes == ((40, 8), (80, 9), (120, 10), (160, 11), (200, 12)), "the sixth is longer"
    assert split(workload, Options(requests=2, scale=4)) == [(10, 2), (30, 2)]
    waste = dict(allocators(workload))
    assert waste["whole buffers"] == pytest.approx(1 - 650 / (5 * 250))
    assert waste["buffers that double"] == pytest.approx(1 - 650 / (64 + 128 + 256 + 256 + 256))
    assert waste["blocks of 1"] == 0 < waste["blocks of 16"] < waste["blocks of 128"]
    tiny_llama(tmp_path / "model", 64)
    found = measure(tmp_path / "model", workload, "on-demand", Options(requests=2, scale=4, seqs=2, seed=0))
    assert found.at_end < 0.3 < found.running


def test_allocators_of_the_example_hold_what_their_sequences_need() -> None:
    example = runpy.run_path(str(ROOT / "examples/allocators.py"))
    sizes, pool = [(5, 3), (20, 2)], example["Pool"]()  # 8 and 22 tokens, side by side
    whole, doubling, paged = (
        example["serve"](sizes, new)
        for new in (
            lambda: example["Buffer"](64),
            lambda: example["Buffer"](1),
            lambda: example["Table"](pool),
        )
    )
    assert [each[0] for each in (whole, doubling, paged)] == [1 - 30 / 128, 1 - 30 / 40, 1 - 30 / 48]
    assert paged[2] == 3 * 16 * 256 * 2
    assert pool.allocator.num_used == 0 and (pool.kvs == 1).all(axis=1).sum() == 8 + 22
