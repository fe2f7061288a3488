"""lab/winnow_lab/memory/without_cache.py computes the same answer twice."""

from pathlib import Path

from tiny_llama import save_tiny_llama

from winnow import LLM
from winnow_lab.memory.without_cache import seconds_with, seconds_without


def test_both_ways_give_the_same_tokens(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model", seed=0)
    with LLM(model, kv_memory="8MiB", dtype="float32", enable_prefix_caching=False) as llm:
        before = llm.stats().prompt_tokens
        kept, _ = seconds_with(llm, [1, 2, 3], 6)
        between = llm.stats().prompt_tokens
        anew, _ = seconds_without(llm, [1, 2, 3], 6)
        assert kept == anew and len(kept) == 6
        assert between - before == 3 and llm.stats().prompt_tokens - between == sum(range(3, 9))
