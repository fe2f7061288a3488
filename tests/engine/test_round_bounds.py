"""Rounds under any policy: no request holds more than was promised."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from round_policies import EVERY_8, POLICIES
from simulated import ROWS, Simulation

from winnow.eviction import EvictionPolicy, When, Window
from winnow.eviction.scores import KeyNorm
from winnow.eviction.sequence import SequenceEviction


@settings(max_examples=12)
@given(
    policy=st.sampled_from([p for p in POLICIES[1:] if p is not None]),
    prompt_len=st.integers(1, 120),
    max_tokens=st.integers(1, 60),
    budget=st.integers(9, 40),
    chunk=st.sampled_from([8, 16, None]),
)
def test_nobody_holds_more_than_was_promised(
    policy: EvictionPolicy, prompt_len: int, max_tokens: int, budget: int, chunk: int | None
) -> None:
    simulation = Simulation(num_blocks=4000, chunk=chunk)
    request = simulation.add(prompt_len, max_tokens, policy=policy, budget=budget)
    cache, [eviction], [sequence] = simulation.scheduler.ledger, request.evictions, request.sequences
    if eviction is None:
        return
    while simulation.scheduler.has_unfinished:
        computed = sequence.num_tokens
        simulation.step()
        if sequence.kv.slot is not None and not policy.when.pressure:
            held = cache.blocks_held(sequence.kv.slot)
            assert held <= eviction.peak_blocks(cache.layout, computed)
            if computed > prompt_len and not sequence.before_replay_round:
                assert held <= eviction.decode_blocks(cache.layout, computed)


def test_nobody_keeps_room_for_a_prompt_that_is_behind_it() -> None:
    # At a budget of 8 rows peak at 8 + 8 KVs in their prompt, four blocks, and at 8 + 4 later, three; seven hold both.
    simulation = Simulation(num_blocks=ROWS * 7)
    first = simulation.add(24, 40, policy=EVERY_8)
    while first.sequences[0].num_output_tokens < 3:
        simulation.step()
    second = simulation.add(24, 4, policy=EVERY_8)
    simulation.step()
    assert second.sequences[0].kv.slot is not None
    simulation.run()
    assert simulation.scheduler.running.num_preemptions == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_window_of_a_round_is_computed_in_one_chunk(chunk: int) -> None:
    eviction = SequenceEviction(EvictionPolicy(Window(7), when=When(after_prefill=True)), 10, 60, 60)
    computed, counts = 0, []
    while computed < 60:
        count = eviction.chunk(computed, 0, computed, 60 - computed, max(chunk, 7))
        observe, first = eviction.observe(computed, computed + count)
        assert (observe is not None) == (computed + count == 60)
        if observe is not None:
            assert first == 53 >= computed
        computed += count
        counts.append(count)
    assert counts[-1] >= 7
    assert eviction.chunk(52, 0, 52, 8, 6) == 1, "with too little room it advances to where the window begins"
    assert eviction.chunk(53, 0, 53, 7, 6) == 0, "and waits there"


def test_rounds_come_behind_runs_that_no_step_cuts() -> None:
    policy, runs = (
        EvictionPolicy(Window(7), when=When(prefill_every=8, after_prefill=True)),
        ((3, 19), (20, 41), (43, 46)),
    )
    eviction = SequenceEviction(policy, 4, 60, 60, uncut=runs)
    behind = {
        end: next((last for first, last in runs if first < end < last), end) for end in range(12, 60, 8)
    }
    ends = sorted({*behind.values(), 60})
    assert ends == [19, 20, 41, 46, 52, 60]
    for computed in range(60):
        following = next(end for end in ends if end > computed)
        assert eviction.tokens_to_round(computed, 0, 50.0) == following - computed
        assert eviction.round_due(computed, 0, 50.0) == (computed in ends)
    shared = replace(policy, score=KeyNorm())
    known = [computed for computed, _ in replace(eviction, policy=shared).snapshots()]
    assert known == sorted({behind[end] for end in behind}, reverse=True)
