"""Every request of a soak ends once, as it would alone, and leaves nothing behind."""

from pathlib import Path

import pytest

from benchmarks.soak import Soak, Tally, open_pair
from benchmarks.soak_load import drawn_lengths, requests, tiny_llama


def soaked(path: Path, count: int, seed: int, host_seqs: int) -> Tally:
    loaded, unloaded = open_pair(tiny_llama(path), kv_seqs=4, host_seqs=host_seqs)
    with loaded, unloaded:
        soak = Soak(loaded, unloaded, preempt=0.2)
        tally = soak.run(requests(count, drawn_lengths(seed), seed))
        assert loaded.stats().num_preemptions > count // 20
        assert loaded.stats().cached_tokens > 0
        assert (loaded.stats().num_swaps > 0) == (host_seqs > 0)
    return tally


@pytest.mark.parametrize("host_seqs", [0, 3])
def test_a_short_soak(tmp_path: Path, host_seqs: int) -> None:
    tally = soaked(tmp_path, 60, 1, host_seqs)
    assert tally.faults == []
    assert tally.finished + tally.aborted + tally.refused == tally.submitted == 60
    assert tally.compared > 20


@pytest.mark.slow
@pytest.mark.parametrize("host_seqs", [0, 3, 100])
def test_a_long_soak(tmp_path: Path, host_seqs: int) -> None:
    tally = soaked(tmp_path, 500, 2, host_seqs)
    assert tally.faults == []
    assert tally.compared > 150
