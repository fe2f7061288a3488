"""Every request of a soak ends once, as it would alone, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
from soak import Options, Soak, Tally, open_pair
from soak_load import DamagedFiles, Failures, drawn_lengths, requests

from winnow_lab.memory.reservation import tiny_llama


def soaked(
    path: Path,
    count: int,
    seed: int,
    host_seqs: int,
    *,
    tenants: bool = False,
    fail_copies: float = 0.0,
    fail_steps: float = 0.0,
    tie: float = 1e-3,
    **options: Any,
) -> Tally:
    loaded, unloaded = open_pair(tiny_llama(path), kv_seqs=4, host_seqs=host_seqs, tenants=tenants, **options)
    with loaded, unloaded:
        failures = Failures(loaded, seed, copies=fail_copies, steps=fail_steps)
        soak = Soak(loaded, unloaded, Options(preempt=0.2, tie=tie))
        tally = soak.run(requests(count, drawn_lengths(seed), seed, tenants))
        assert loaded.stats().num_preemptions > count // 20
        assert tenants or loaded.stats().cached_tokens > 0
        assert (loaded.stats().num_swaps > 0) == (host_seqs > 0)
        assert (failures.copies > 0) == (fail_copies > 0)
        assert tally.failed_steps == failures.steps and (failures.steps > 0) == (fail_steps > 0)
    assert tally.faults == []
    assert tally.finished + tally.aborted + tally.refused == tally.submitted == count + tally.forked
    return tally


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"seed": 2, "host_seqs": 0},
        {
            "seed": 2,
            "host_seqs": 3,
            "tenants": True,
            "scheduling_policy": "fair",
            "fail_copies": 0.1,
            "fail_steps": 0.04,
        },
        {"seed": 2, "host_seqs": 3, "kv_cache_dtype": "int8", "tie": 0.05, "scheduling_policy": "srtf"},
    ],
)
def test_a_soak(tmp_path: Path, setting: dict[str, Any]) -> None:
    tally = soaked(tmp_path, 24, **setting)
    assert tally.compared > 4
    assert tally.forked > 0 and tally.compared_forks > 0


def test_conversations_of_which_files_are_damaged(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = {"prefix_cache_dir": cache, "prefix_cache_disk": "128KiB"}
    loaded, unloaded = open_pair(tiny_llama(tmp_path), kv_seqs=4, **options)
    with loaded, unloaded:
        damaged = DamagedFiles(cache, 0.2, 3)
        settings = Options(follow=0.7, idle=0.2, check_every=4)

        def damage() -> None:
            loaded.write_prefixes()  # a busy machine would write nothing in time
            damaged.perhaps()

        soak = Soak(loaded, unloaded, settings, damage)
        tally = soak.run(requests(24, drawn_lengths(3), 3))
        disk = loaded.stats().disk_tier
    assert tally.faults == [] and tally.compared > 5 and tally.followed > 5 and tally.idles > 2
    assert disk is not None and damaged.count > 4
    assert disk.loaded_tokens > 0 and disk.num_damaged > 0 and disk.num_dropped > 0
