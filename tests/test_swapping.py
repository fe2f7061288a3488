"""Requests that are preempted all the time, by copies in host memory, answer as if they were alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCAB

from winnow import LLM, SamplingParams
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.request import Sequence
from winnow.errors import ConfigError
from winnow.eviction.presets import PRESETS

OPTIONS: dict[str, Any] = {
    "prefill_chunk": 48,
    "max_model_len": 512,
    "num_accumulators": 2,
    "kv_floor": 1,
    "enable_prefix_caching": False,
}


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randint(3, VOCAB - 1) for _ in range(length)]


def requests_of(
    name: str, n: int = 1, count: int = 5, least: int = 14, most: int = 32
) -> list[tuple[list[int], SamplingParams]]:
    """`count` requests under a policy, for `least` to `most` tokens and n samples."""
    chance = random.Random(name)
    amount: dict[str, Any] = {}
    if name != "full":
        # Rounds by load would depend on who else runs.
        policy = PRESETS[name].policy
        when = replace(
            policy.when.alone,
            prefill_every=policy.when.prefill_every and min(policy.when.prefill_every, 32),
            decode_every=policy.when.decode_every and min(policy.when.decode_every, 8),
        )
        amount = {"eviction": replace(policy, when=when)}
        amount |= {"kv_budget": 72}
    return [
        (
            prompt(chance.randint(90, 140), seed),
            SamplingParams(
                n=n,
                temperature=0.0 if n == 1 else 1.0,
                seed=seed,
                max_tokens=chance.randint(least, most),
                ignore_eos=True,
                presence_penalty=0.5,
                **amount,
            ),
        )
        for seed in range(count)
    ]


@cache
def alone(directory: Path, *asked: Any) -> list[list[list[int]]]:
    with LLM(directory, **OPTIONS) as llm:
        return [
            [answer.token_ids for answer in llm.generate(tokens, params)[0].outputs]
            for tokens, params in requests_of(*asked)
        ]


def swapping(directory: Path, **options: Any) -> LLM:
    """An LLM that swaps whatever it preempts."""
    llm = LLM(directory, **OPTIONS | {"kv_offloading_size": "4MiB"} | options)
    scheduler_of(llm).memory.swap.costs = SwapCosts(1e-15, 1.0)
    return llm


def scheduler_of(llm: LLM) -> Any:
    engine: Any = llm._engine
    return engine.scheduler


def run(llm: LLM, each_step: Callable[[int], None]) -> dict[str, list[list[int]]]:
    """Step to the end. Returns the token ids of each request's answers."""
    answers, num_steps = {}, 0
    while llm.has_unfinished:
        for output in llm.step():
            if output.finished:
                assert output.error is None
                answers[output.request_id] = [answer.token_ids for answer in output.outputs]
        num_steps += 1
        llm.check_integrity()
        each_step(num_steps)
    return answers


@pytest.mark.parametrize(
    ("name", "n"),
    [("full", 3), ("batch-max", 1), ("kv-compress", 1), ("kvzip", 3), ("snapkv", 1), ("h2o", 3)],
)
def test_answers_are_those_of_an_unloaded_engine(directory: Path, name: str, n: int) -> None:
    requests, expected = requests_of(name, n), alone(directory, name, n)
    chance = random.Random(n)
    with swapping(directory, kv_memory=700_000, max_num_seqs=8) as llm:
        scheduler = scheduler_of(llm)

        def preempt(step: int) -> None:
            if step % 2 == 0 and len(scheduler.running) > 1:
                scheduler.running.preempt(chance.choice(scheduler.running))
                llm.check_integrity()

        ids = [llm.submit(tokens, params) for tokens, params in requests]
        answers = run(llm, preempt)
        stats = llm.stats()
    assert [answers[request_id] for request_id in ids] == expected
    assert stats.num_swaps > 8
    assert stats.swap_bytes_out >= stats.swap_bytes_in > 0
    assert stats.host_bytes_used == 0 < stats.host_bytes_peak <= stats.host_bytes_budget


@pytest.mark.parametrize("host", [None, "64KiB", "4MiB"])
def test_a_pool_that_is_too_small_for_all(directory: Path, host: str | None) -> None:
    """The engine preempts by itself; where the host tier is full, tokens are computed again."""
    asked = "full", 1, 6, 20, 50
    requests, expected = requests_of(*asked), alone(directory, *asked)
    with swapping(directory, kv_memory="220KiB", max_num_seqs=6, kv_offloading_size=host) as llm:
        if host == "64KiB":  # the least that is allowed holds one of these sequences
            scheduler_of(llm).ledger.host.limit = 20 * 2**10
        ids = [llm.submit(tokens, params) for tokens, params in requests]
        answers = run(llm, lambda step: None)
        stats = llm.stats()
    assert [answers[request_id] for request_id in ids] == expected
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (host == "4MiB")
    assert (stats.recomputed_tokens > 0) == (host != "4MiB")
    assert set(stats.elapsed) == {"schedule", "execute", "output", "evict", "swap"}


def content(llm: LLM, sequence: Sequence) -> list[torch.Tensor]:
    """All bits of a sequence's rows, with positions and accumulators, in the order of its tables."""
    engine: Any = llm._engine
    executor, ledger = engine._executor, engine.scheduler.ledger
    executor.apply(ledger.take_update())
    blocks = torch.from_numpy(ledger.blocks_of(sequence.kv.running_slot)).long()
    filled = []
    for part in executor.cache.pool.kinds[0].parts:
        filled.append(part.pieces[0][blocks].clone().view(torch.uint8))
    return filled


@pytest.mark.parametrize("name", ["full", "kv-compress", "h2o"])
def test_a_swapped_sequence_is_bit_by_bit_what_it_was(directory: Path, name: str) -> None:
    tokens, params = requests_of(name)[0]
    with swapping(directory) as llm:
        scheduler = scheduler_of(llm)
        llm.submit(tokens, params)
        for _ in range(8):
            llm.step()
        [sequence] = scheduler.running
        held, lengths = content(llm, sequence), scheduler.ledger.lengths[sequence.kv.slot].copy()
        state = sequence.kv.num_computed, sequence.kv.last_round
        scheduler.running.park(sequence)
        other = scheduler.ledger.open()  # so that it comes back elsewhere
        scheduler.ledger.append([other], [40])
        scheduler._resume(sequence)
        assert (sequence.kv.num_computed, sequence.kv.last_round) == state
        assert (scheduler.ledger.lengths[sequence.kv.slot] == lengths).all()
        assert all(torch.equal(a, b) for a, b in zip(content(llm, sequence), held, strict=True))
        scheduler.ledger.close(other)
        llm.abort(next(iter(llm._engine.requests)))
        llm.check_integrity()


def test_what_a_request_cost_is_in_its_output(directory: Path) -> None:
    with swapping(directory) as llm:
        scheduler = scheduler_of(llm)
        first, second = (
            llm.submit(prompt(60, seed), SamplingParams(max_tokens=20, ignore_eos=True)) for seed in (1, 2)
        )
        outputs = {}
        while llm.has_unfinished:
            outputs |= {output.request_id: output for output in llm.step()}
            if len(scheduler.running) == 2 and not scheduler.running.num_preemptions:
                scheduler.running.preempt()
        assert outputs[first].metrics.num_preemptions == outputs[first].metrics.num_swaps == 0
        metrics, stats = outputs[second].metrics, llm.stats()
        assert metrics.num_preemptions == metrics.num_swaps == 1
        assert metrics.swap_bytes_out == metrics.swap_bytes_in == stats.swap_bytes_out > 0
        assert 0 < metrics.swap_seconds == stats.elapsed["swap"]
        assert metrics.recomputed_tokens == 0


@pytest.mark.parametrize("when", ["out", "in"])
def test_where_the_system_has_no_memory_only_that_request_loses_time(
    directory: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = requests_of("kv-compress"), alone(directory, "kv-compress")
    with swapping(directory) as llm:
        scheduler, executor = scheduler_of(llm), llm._engine._executor  # type: ignore[attr-defined]
        tier, failed = executor.cache.host, []
        done = getattr(tier, "save" if when == "out" else "load")

        def fail(host_id: int, blocks: Any) -> None:
            if len(failed) < 2:
                failed.append(host_id)
                raise RuntimeError("not enough memory")
            done(host_id, blocks)

        monkeypatch.setattr(tier, "save" if when == "out" else "load", fail)

        def preempt(step: int) -> None:
            if step % 5 == 0 and len(scheduler.running) > 1:
                scheduler.running.preempt()

        ids = [llm.submit(tokens, params) for tokens, params in requests]
        answers = run(llm, preempt)
        stats = llm.stats()
    assert [answers[request_id] for request_id in ids] == expected
    assert len(failed) == 2 and stats.num_swaps > 0 and stats.recomputed_tokens > 0
    assert stats.host_bytes_used == 0 and tier.nbytes == 0


def test_an_aborted_swapped_request_returns_its_host_memory_though_no_step_follows(directory: Path) -> None:
    with swapping(directory) as llm:
        scheduler = scheduler_of(llm)
        first, second = (llm.submit(prompt(60, seed), SamplingParams(max_tokens=20)) for seed in (1, 2))
        llm.step()
        llm.step()
        scheduler.running.preempt()
        tier = llm._engine._executor.cache.host  # type: ignore[attr-defined]
        assert tier.nbytes > 0 and llm.stats().host_bytes_used > 0
        llm.abort(first)
        output = llm.abort(second)
        assert output is not None and output.outputs[0].finish_reason == "abort"
        assert tier.nbytes == llm.stats().host_bytes_used == 0 and not tier.host_ids
        llm.check_integrity()


def test_sizes_are_read_as_elsewhere(directory: Path) -> None:
    with LLM(directory, **{"swap_space": "1MiB"}, **OPTIONS) as llm:
        assert llm.config.cache.kv_offloading_size == 2**20 == llm.stats().host_bytes_budget
    with pytest.raises(ConfigError, match="kv_offloading_size must be"):
        LLM(directory, kv_offloading_size="much")
    with pytest.raises(ConfigError, match="kv_offloading_size must fit"):
        LLM(directory, kv_offloading_size="1000TiB")
