"""Blocks that requests hold from their start: the contiguous cache of old, to compare with."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.cache import CacheSize
from winnow.cache.layout import ceil_div
from winnow.errors import CapacityError, ConfigError

BLOCK, MAX_LEN = 4, 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [random.Random(length).choices(range(3, VOCAB), k=length) for length in (5, 30, 61, 100)]
MODES = ("on-demand", "prompt", "max")


def open_llm(directory: Path, mode: str, **options: Any) -> LLM:
    chosen = {
        "kv_memory": "4MiB",
        "block_size": BLOCK,
        "prefill_chunk": 16,
        "max_model_len": MAX_LEN,
    } | options
    return LLM(directory, kv_reservation=mode, **chosen)


@pytest.fixture(params=MODES)
def llm(directory: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(directory, request.param) as llm:
        yield llm
        assert llm._engine.scheduler.ledger.allocator.num_used == 0


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    with open_llm(directory, "on-demand", enable_prefix_caching=False) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def reserved(mode: str, prompt: list[int], computed: int) -> int:
    """Blocks of a row."""
    tokens = {"on-demand": computed, "prompt": len(prompt) + 19, "max": MAX_LEN}[mode]
    return ceil_div(tokens, BLOCK)


@pytest.mark.parametrize("mode", MODES)
def test_the_ledger_holds_what_is_reserved(directory: Path, mode: str) -> None:
    with open_llm(directory, mode, enable_prefix_caching=False) as llm:
        ledger, prompt = llm._engine.scheduler.ledger, PROMPTS[2]
        llm.submit(prompt, GREEDY)
        for step in range(8):
            llm.step()
            llm.check_integrity()
            computed = min(16 * (step + 1), 61) if step < 4 else 61 + step - 3
            rows = ledger.layout.rows_per_seq
            assert ledger.allocator.num_used == rows * reserved(mode, prompt, computed)
            stats = llm.stats()
            assert stats.kv_bytes_held == ledger.allocator.num_used * ledger.layout.block_bytes
            assert llm.occupancy().filled_bytes == rows * computed * ledger.layout.block_bytes // BLOCK


def test_answers_are_the_same(llm: LLM, expected: list[list[int]]) -> None:
    ids, found = [llm.submit(prompt, GREEDY) for prompt in PROMPTS], {}
    while llm.has_unfinished:
        found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        llm.check_integrity()
    assert [found[each] for each in ids] == expected


def test_samples_and_forks_hold_their_own(llm: LLM, expected: list[list[int]]) -> None:
    ledger = llm._engine.scheduler.ledger
    mode = llm.config.cache.kv_reservation
    llm.submit(PROMPTS[2], replace(GREEDY, n=3))
    for _ in range(6):
        llm.step()
    if mode != "on-demand":
        held = 3 * reserved(mode, PROMPTS[2], 0) * ledger.layout.rows_per_seq
        assert ledger.allocator.num_used == held
        assert not any(ledger.is_shared(slot) for slot in range(3))
    child = llm.fork("request-0")
    found = {}
    while llm.has_unfinished:
        found |= {output.request_id: [each.token_ids for each in output.outputs] for output in llm.step()}
        llm.check_integrity()
    assert found == {"request-0": [expected[2]] * 3, child: [expected[2]]}


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "winnow"])
def test_a_policy_frees_nothing_that_is_reserved(directory: Path, policy: str) -> None:
    found = {}
    for mode in MODES:
        with open_llm(directory, mode, prefill_chunk=32) as llm:
            ledger = llm._engine.scheduler.ledger
            params = replace(GREEDY, eviction=policy, kv_budget=40)
            llm.submit(PROMPTS[2], params)
            while llm.has_unfinished:
                for output in llm.step():
                    found[mode] = output.outputs[0].token_ids
                llm.check_integrity()
                if llm.has_unfinished and mode == "max":
                    assert ledger.allocator.num_used >= MAX_LEN // BLOCK * ledger.layout.rows_per_seq
    assert found["max"] == found["prompt"] == found["on-demand"]


@pytest.mark.parametrize("mode", MODES)
def test_fewer_run_at_once(directory: Path, mode: str, expected: list[list[int]]) -> None:
    """A pool for two requests of the longest length: who reserves less lets more in, and all get their answers."""
    with open_llm(directory, "on-demand") as llm:
        layout = llm._engine.scheduler.ledger.layout
    size = CacheSize.of_blocks(layout, 2 * layout.blocks_for(MAX_LEN), 8, MAX_LEN)
    with open_llm(directory, mode, kv_memory=size.nbytes(layout), max_num_seqs=8) as llm:
        ids, most, found = [llm.submit(PROMPTS[i % 2], GREEDY) for i in range(8)], 0, {}
        while llm.has_unfinished:
            found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
            most = max(most, llm.stats().num_running)
            llm.check_integrity()
        assert [found[each] for each in ids] == [expected[i % 2] for i in range(8)]
        assert most == {"max": 2, "prompt": 7, "on-demand": 8}[mode]


def test_what_cannot_be_reserved_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_reservation must be one of .* got 'half'"):
        open_llm(directory, "half")
    with pytest.raises(ConfigError, match=r"kv_reservation=max holds .* up to 128 tokens \(max_model_len\)"):
        open_llm(directory, "max", kv_memory="24KiB", max_num_seqs=4)
    with (
        open_llm(directory, "prompt", kv_memory="24KiB", max_num_seqs=4) as llm,
        pytest.raises(CapacityError),
    ):
        llm.generate(PROMPTS[3], replace(GREEDY, max_tokens=28))
