"""Memory of rounds, as the bench of eviction's overhead measures it."""

import pytest

from winnow import LLM, SamplingParams
from winnow.engine.scheduling.eviction_scheduler import EvictionScheduler
from winnow_lab.speed.eviction_overhead import RoundMemory


def test_a_round_needs_more_than_its_scores_and_more_where_heads_compete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    with LLM(kv_memory="16MiB", kv_floor=1) as llm:
        # The first round of an engine also allocates what stays: tables, and buffers of kernels.
        for preset in ("snapkv", "snapkv", "kv-compress"):
            memory = RoundMemory()
            with monkeypatch.context() as patch:
                patch.setattr(EvictionScheduler, "_run", memory.around(EvictionScheduler._run))
                prompt = [5 + number % 3000 for number in range(600)]
                llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True, eviction=preset))
            [(most, found[preset])] = memory.peaks
            assert most > 4 * 600, "scores alone take that of one row"
    assert 2 < found["snapkv"] < found["kv-compress"] < 40
