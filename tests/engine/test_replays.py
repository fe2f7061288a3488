"""Replays in the scheduler: passes behind the context, one after the other, and nothing of them stays."""

import pytest
from simulated import BLOCK, ROWS, Simulation

from winnow.engine.requests.request import Request
from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, Reconstruction, Replay, When

REPLAYED = EvictionPolicy(Reconstruction(Replay(chunk=16)), AdaptiveRows(), Keep(), When(after_prefill=True))


def passes_of(simulation: Simulation, request: Request) -> list[tuple[int, int]]:
    """First and last position of each piece of the request's replays."""
    return [
        (entry.start, entry.end)
        for step in simulation.steps
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True)
        if entry.replay is not None and sequence.request is request
    ]


def test_each_chunk_is_repeated_right_behind_the_context_before_the_round() -> None:
    simulation = Simulation(num_blocks=400, tokens=64, chunk=64)
    request = simulation.add(40, 4, policy=REPLAYED, budget=12)
    simulation.run()
    assert passes_of(simulation, request) == [(40, 56), (40, 56), (40, 48)]
    [[member]] = simulation.executor.rounds
    assert member.computed == 40
    assert request.sequences[0].num_output_tokens == 4


def test_passes_share_the_token_budget_with_what_else_runs() -> None:
    simulation = Simulation(num_blocks=400, tokens=12, chunk=10)
    first = simulation.add(30, 60)
    second = simulation.add(40, 4, policy=REPLAYED, budget=12)
    while not second.finished:
        step = simulation.step()
        assert step.plan.num_tokens <= 12
        running = first.sequences[0]
        decodes = running.is_decoding or running.finished
        assert not decodes or first.finished or running in step.sequences[:1]
    pieces = passes_of(simulation, second)
    assert {end - start for start, end in pieces} <= set(range(1, 11))
    assert sum(end - start for start, end in pieces) == 40


def test_samples_have_one_replay_among_them() -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(40, 6, n=3, policy=REPLAYED, budget=12)
    simulation.run()
    assert sum(end - start for start, end in passes_of(simulation, request)) == 40
    assert len(simulation.executor.rounds) == 1
    assert {sequence.kv.last_round for sequence in request.sequences} == {40}


@pytest.mark.parametrize("steps", range(1, 9))
def test_who_is_preempted_in_the_middle_repeats_it_all_again(steps: int) -> None:
    simulation = Simulation(num_blocks=400, chunk=8)
    request = simulation.add(24, 4, policy=REPLAYED, budget=8)
    for _ in range(steps):
        simulation.step()
    simulation.scheduler.running.preempt()
    assert simulation.scheduler.ledger.allocator.num_used == 0
    simulation.steps.clear()
    simulation.executor.rounds.clear()
    simulation.run()
    assert passes_of(simulation, request) == [(24, 32), (32, 40), (24, 32)]
    assert [member.computed for [member] in simulation.executor.rounds] == [24]


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    simulation = Simulation(num_blocks=400, chunk=8)
    request = simulation.add(24, 4, policy=REPLAYED, budget=8)
    while not request.sequences[0].kv.replayed:
        simulation.step()
    simulation.scheduler.running.finish(request.sequences[0], "abort")
    kept = request.sequences[0].kept
    assert kept is not None and (kept == 24).all()
    assert simulation.scheduler.ledger.allocator.num_used == 0


def test_admission_counts_the_replay() -> None:
    # Each peaks at 24 + 16 KVs a row, ten blocks; nineteen rows of them do not hold two.
    simulation = Simulation(num_blocks=ROWS * (2 * 40 // BLOCK - 1), chunk=64)
    first = simulation.add(24, 8, policy=REPLAYED, budget=8)
    second = simulation.add(24, 8, policy=REPLAYED, budget=8)
    simulation.step()
    assert first.sequences[0].kv.slot is not None
    assert second.sequences[0].kv.slot is None
    simulation.run()
    assert simulation.scheduler.running.num_preemptions == 0
