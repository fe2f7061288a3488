"""Scheduling without a model: budgets, order, preemption, nothing lost."""

import pytest
from simulated import BLOCK, ROWS, Simulation

from winnow.engine.requests.request import Request


def test_decodes_come_first_and_share_the_step_with_chunks() -> None:
    simulation = Simulation(num_blocks=400, tokens=20, chunk=16)
    simulation.add(10, 5)
    simulation.step()
    simulation.add(40, 5)
    step = simulation.step()
    assert [s.request.request_id for s in step.sequences] == ["0", "1"]
    assert [(e.start, e.count, len(e.samplers)) for e in step.plan.entries] == [(10, 1, 1), (0, 16, 0)]


def test_the_token_budget_is_never_exceeded_and_used_while_there_is_work() -> None:
    simulation = Simulation(num_blocks=4000, max_num_seqs=8, tokens=24, chunk=16)
    for _ in range(4):
        simulation.add(60, 4)
    while simulation.scheduler.has_unfinished:
        scheduler = simulation.scheduler
        work = sum(min(16, s.num_to_compute) for s in [*scheduler.running, *scheduler.waiting])
        assert simulation.step().plan.num_tokens == min(24, work)


def test_whole_prompts_without_chunking() -> None:
    simulation = Simulation(num_blocks=4000, tokens=64, chunk=None)
    for length in (50, 30, 100):
        simulation.add(length, 2)
    simulation.run()
    first = [
        (s.prompt_len, e.count, step.plan.num_tokens)
        for step in simulation.steps
        for s, e in zip(step.sequences, step.plan.entries, strict=True)
        if e.start == 0
    ]
    # 50 and 30 do not fit into one step of 64; 100 is larger than the budget and waits until it can go alone
    assert first == [(50, 50, 50), (30, 30, 31), (100, 100, 100)]


def test_pressure_preempts_the_newest_which_loses_nothing() -> None:
    # Two prompts of 8 blocks a row fit into 18; both want to grow to 12.
    simulation = Simulation(num_blocks=ROWS * 18, tokens=64, chunk=None)
    old, new = simulation.add(32, 16), simulation.add(32, 16)
    simulation.run()
    assert old.metrics.num_preemptions == 0
    assert new.metrics.num_preemptions == simulation.scheduler.running.num_preemptions == 1
    assert [s.request for s in simulation.finished] == [old, new]
    assert all(s.num_output_tokens == 16 for s in simulation.finished)
    assert simulation.scheduler.ledger.allocator.num_used == 0


def test_a_preempted_sequence_frees_what_it_held_at_once_and_waits_before_later_ones() -> None:
    simulation = Simulation(num_blocks=ROWS * 18, max_num_seqs=2, tokens=64, chunk=None)
    simulation.add(32, 16)
    preempted, later = simulation.add(32, 16), simulation.add(4, 4)
    while not simulation.scheduler.running.num_preemptions:
        simulation.step()
    assert preempted.sequences[0].kv.slot is None
    assert simulation.executor.plans[-1].update.closed == (1,)
    assert list(simulation.scheduler.waiting) == [*preempted.sequences, *later.sequences]


def test_the_greater_priority_is_served_first_and_equals_as_they_came() -> None:
    simulation = Simulation(num_blocks=ROWS * 20, max_num_seqs=1, tokens=64)
    priorities = [0, 3, -1, 3, 0, 2**62]
    requests = [simulation.add(20, 10, priority=priority) for priority in priorities]
    simulation.run()
    order = [requests[i] for i in (5, 1, 3, 0, 4, 2)]
    assert [s.request for s in simulation.finished] == order
    starts = [request.metrics.first_scheduled_time for request in order]
    assert starts == sorted(starts)
    assert simulation.scheduler.running.num_preemptions == 0


def test_pressure_preempts_the_lowest_priority_and_of_equals_the_latest() -> None:
    # Three prompts of 8 blocks a row fit into 26; all want to grow to 12, for which there is room for two.
    simulation = Simulation(num_blocks=ROWS * 26, tokens=96, chunk=None)
    urgent = simulation.add(32, 16, priority=1)
    simulation.add(32, 16, priority=2)
    low = simulation.add(32, 16)
    simulation.run()
    assert low.metrics.num_preemptions == simulation.scheduler.running.num_preemptions > 0
    assert simulation.finished[-1].request is low

    simulation = Simulation(num_blocks=ROWS * 27, tokens=96, chunk=None)
    low = simulation.add(32, 16)
    simulation.step()
    urgent, last = simulation.add(32, 15, priority=1), simulation.add(32, 15, priority=1)
    simulation.run()
    preemptions = [request.metrics.num_preemptions for request in (urgent, last, low)]
    assert preemptions[0] == 0
    assert preemptions[2] > 0, "though it was admitted first"
    assert simulation.finished[-1].request is low


def test_nobody_is_served_before_one_of_greater_priority_that_needs_more_room() -> None:
    simulation = Simulation(num_blocks=ROWS * 20, tokens=128, chunk=None)
    running = simulation.add(40, 8, priority=1)
    simulation.step()
    large, small = simulation.add(60, 4, priority=1), simulation.add(4, 4)
    while not running.finished:
        assert {large.sequences[0].kv.slot, small.sequences[0].kv.slot} == {None}
        simulation.step()
    simulation.run()
    assert [s.request for s in simulation.finished][:2] == [running, large]


def test_nobody_is_admitted_into_room_that_is_promised_to_others() -> None:
    # Prompts of 10 blocks a row, in chunks of one block; 18 blocks a row hold one of them, and not two.
    simulation = Simulation(num_blocks=ROWS * 18, tokens=64, chunk=BLOCK)
    first, second = simulation.add(40, 2), simulation.add(40, 2)
    while not first.finished:
        assert second.sequences[0].kv.slot is None
        simulation.step()
    simulation.run()
    assert simulation.scheduler.running.num_preemptions == 0


def test_samples_share_the_prompt() -> None:
    simulation = Simulation(num_blocks=ROWS * 100, tokens=64, chunk=None)
    simulation.add(32, 4, n=4)
    step = simulation.step()
    assert [s.index for s in step.samplers] == [0, 1, 2, 3]
    assert simulation.scheduler.ledger.allocator.num_used == ROWS * 32 // BLOCK, "one prompt for four samples"
    simulation.step()
    assert simulation.scheduler.ledger.allocator.num_used == ROWS * (32 // BLOCK + 4), (
        "each sample writes its own block"
    )
    assert step.plan.num_tokens == 32


def test_samples_that_find_no_slot_come_later() -> None:
    simulation = Simulation(num_blocks=ROWS * 100, max_num_seqs=2, tokens=64, chunk=None)
    simulation.add(32, 4, n=5)
    simulation.run()
    assert sorted(s.index for s in simulation.finished) == [0, 1, 2, 3, 4]


class TestWhatFitsNowhere:
    """Admission refuses such requests; should it be wrong about one, the others go on."""

    def finish_reasons(self, simulation: Simulation, *requests: Request) -> list[list[str | None]]:
        simulation.run(2000)
        assert simulation.scheduler.ledger.allocator.num_used == 0
        assert sorted(map(id, simulation.finished)) == sorted(id(s) for r in requests for s in r.sequences)
        return [[s.finish_reason for s in request.sequences] for request in requests]

    @pytest.mark.parametrize("chunk", [None, 16])
    def test_a_prompt_fails_alone(self, chunk: int | None) -> None:
        simulation = Simulation(num_blocks=ROWS * 20, tokens=128, chunk=chunk)
        requests = [simulation.add(length, 4) for length in (20, 100, 30)]
        assert self.finish_reasons(simulation, *requests) == [["length"], ["error"], ["length"]]
        error = requests[1].sequences[0].error
        assert error is not None
        assert "100 tokens" in error and "100 blocks" in error and "there are 80" in error

    def test_each_sample_fails(self) -> None:
        simulation = Simulation(num_blocks=ROWS * 20, tokens=128)
        requests = [simulation.add(100, 4, n=3), simulation.add(30, 4, n=2)]
        assert self.finish_reasons(simulation, *requests) == [["error"] * 3, ["length"] * 2]

    def test_an_answer_fails_where_memory_ends(self) -> None:
        simulation = Simulation(num_blocks=ROWS * 20, tokens=128)
        requests = [simulation.add(length, tokens) for length, tokens in ((20, 4), (40, 100), (30, 4))]
        assert self.finish_reasons(simulation, *requests) == [["length"], ["error"], ["length"]]
        [failed] = requests[1].sequences
        assert failed.num_tokens == 81, "the KV of the last is never computed"
        assert failed.error is not None and "84 blocks" in failed.error and "there are 80" in failed.error

    def test_a_plan_without_entries_still_tells(self) -> None:
        simulation = Simulation(num_blocks=ROWS * 20, tokens=128)
        simulation.add(100, 4)
        assert not simulation.scheduler.schedule().plan.entries
        [failed] = simulation.scheduler.running.take_failed()
        assert failed.finish_reason == "error" and not simulation.scheduler.has_unfinished
