"""KVs kept in 16 bits beside narrow ones, of requests that are swapped, share a prefix, or begin with a saved one."""

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import VOCAB

from winnow import LLM, RequestOutput, SamplingParams
from winnow.engine.memory.swap_costs import SwapCosts

LENGTH = 96
DOCUMENT = random.Random(7).choices(range(3, VOCAB), k=LENGTH)
QUESTIONS = [random.Random(n).choices(range(3, VOCAB), k=n) for n in (9, 20)]
OPTIONS: dict[str, Any] = {
    "kv_cache_dtype": "int4",
    "kv_wide": "layers=1,sinks=2,recent=8",
    "block_size": 4,
    "kv_memory": "8MiB",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_floor": 1,
    "prefill_chunk": 32,
}


def ask(llm: LLM, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, context_tokens=LENGTH, **options
    )
    outputs = [llm.generate([DOCUMENT + each], params)[0] for each in QUESTIONS]
    llm.check_integrity()
    return outputs


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("full", {}),
        ("full", {"kv_cache_dtype": "int4", "kv_group": 8, "block_size": 8, "kv_wide": "recent=8"}),
        ("keydiff", {}),
        ("kvzip", {}),
    ],
    ids=["full", "recent", "keydiff", "kvzip"],
)
def test_prefixes_change_nothing(policy: str, options: dict[str, Any], directory: Path) -> None:
    """Of the same chunks: which KVs are recent depends on where chunks end."""
    amount: dict[str, Any] = {} if policy == "full" else {"compression": 4.0}
    options = OPTIONS | options | {"eviction": policy} | amount
    with LLM(directory, **options, enable_prefix_caching=False) as llm:
        expected = ask(llm)
    with LLM(directory, **options) as llm:
        found = ask(llm)
        again = ask(llm)
    assert [each.num_cached_tokens > 0 for each in (*found, *again)] == [False, True, True, True]
    assert_same(found, expected)
    if policy != "full":
        assert_same(again, expected)


@pytest.mark.parametrize("wide", [OPTIONS["kv_wide"], "sinks=3"])
def test_another_engine_begins_with_a_saved_prefix(wide: str, directory: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"eviction": "kvzip", "compression": 4.0, "kv_wide": wide}
    with LLM(directory, **options) as llm:
        llm.save_prefix(DOCUMENT, tmp_path)
    with LLM(directory, **options, enable_prefix_caching=False) as llm:
        expected = ask(llm)
    with LLM(directory, **options, prefix_store=tmp_path) as llm:
        found = ask(llm)
        assert llm.stats().num_rounds == 0
    assert_same(found, expected)


def test_swapped_requests_answer_as_if_alone(directory: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = [DOCUMENT[n:] + DOCUMENT[:n] for n in range(0, 60, 10)]
    options = OPTIONS | {"enable_prefix_caching": False}
    with LLM(directory, **options) as llm:
        layout = llm._engine._executor.layout
        size = llm._engine._executor.size
        expected = [llm.generate([each], params)[0] for each in prompts]
    room = type(size).of_blocks(layout, 2 * layout.blocks_for(LENGTH + 20), 4, 256).nbytes(layout)
    with LLM(directory, **options | {"kv_memory": room}, kv_offloading_size="4MiB") as llm:
        llm._engine.scheduler.memory.swap.costs = SwapCosts(1e-15, 1.0)
        found = llm.generate(prompts, params)
        assert llm.stats().num_swaps > 0
        llm.check_integrity()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
