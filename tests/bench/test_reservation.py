"""benchmarks/reservation.py measures what the paper's table says of contiguous caches."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.reservation import WORKLOADS, lengths, measure, save_model


@pytest.mark.parametrize("workload", WORKLOADS[:2], ids=lambda workload: workload.name)
def test_the_more_is_reserved_the_more_is_wasted(tmp_path: Path, workload: object) -> None:
    save_model(tmp_path, 256)
    arguments = Namespace(requests=8, scale=16, seqs=2, seed=0)
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
