"""Copies are timed within the host tier's limit, also where blocks of some kinds are larger than the mean."""

from pathlib import Path

import pytest
from tiny_llama import save_tiny_llama

from winnow import LLM


@pytest.mark.parametrize("size", ["64KiB", "1MiB"])
def test_an_engine_starts_with_a_small_host_tier(tmp_path: Path, size: str) -> None:
    options = {"kv_memory": "16MiB", "block_size": 8, "value_tier": "host:L=0,N=8"}
    with LLM(save_tiny_llama(tmp_path, seed=0), kv_offloading_size=size, **options) as llm:
        assert llm.stats().host_bytes_used == 0
        llm.check_integrity()
