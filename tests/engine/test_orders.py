"""Who is served first, who is parked for whom, and that nobody waits for ever."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from simulated import BLOCK, ROWS, Simulation

from winnow.engine.requests.request import Request, Sequence
from winnow.engine.scheduling.queue import Fair, WaitingQueue
from winnow.outputs import RequestMetrics
from winnow.sampling import SamplingParams

POLICIES = ["fcfs", "priority", "srtf", "fair"]


def finish_order(simulation: Simulation, requests: list[Request]) -> list[int]:
    simulation.run()
    return [requests.index(sequence.request) for sequence in simulation.finished]


def served_alone(policy: str, arrivals: list[dict[str, Any]], **options: Any) -> list[int]:
    """In which order requests that arrive together are served one at a time."""
    simulation = Simulation(ROWS * 40, max_num_seqs=1, tokens=64, scheduling_policy=policy, **options)
    return finish_order(simulation, [simulation.add(**each) for each in arrivals])


def test_fcfs_minds_no_priority_and_no_length() -> None:
    arrivals = [
        {"prompt_len": length, "max_tokens": 4, "priority": p} for length, p in ((30, 0), (9, 5), (20, 9))
    ]
    assert served_alone("fcfs", arrivals) == [0, 1, 2]


def test_srtf_serves_the_fewest_tokens_first() -> None:
    lengths = [(30, 4), (9, 20), (9, 4), (20, 4)]
    arrivals = [{"prompt_len": prompt, "max_tokens": answer} for prompt, answer in lengths]
    assert served_alone("srtf", arrivals) == [2, 3, 1, 0]


def test_prefix_serves_prompts_that_begin_alike_together() -> None:
    simulation = Simulation(ROWS * 40, max_num_seqs=1, tokens=64, scheduling_policy="prefix")
    arrivals = [([5, 1, 1, 2], 0), ([3, 1, 1, 2], 0), ([5, 1, 7, 2], 1), ([5, 1, 1, 1], 0), ([3, 1, 1], 0)]
    requests = [
        simulation.add(prompt_len=len(prompt), prompt=prompt, max_tokens=2, priority=priority)
        for prompt, priority in arrivals
    ]
    assert finish_order(simulation, requests) == [2, 4, 1, 3, 0]


def test_fair_takes_turns_in_any_order_of_arrival() -> None:
    arrivals = [{"prompt_len": 20, "max_tokens": 4, "tenant": tenant} for tenant in "aaaabb"]
    assert served_alone("fair", arrivals) == [0, 4, 1, 5, 2, 3]


def test_fair_serves_by_weight() -> None:
    arrivals = [{"prompt_len": 20, "max_tokens": 4, "tenant": tenant} for tenant in "aaaaaabbbbbb"]
    order = served_alone("fair", arrivals, tenants={"a": {"weight": 2}})
    assert sorted(order[:9]) == [0, 1, 2, 3, 4, 5, 6, 7, 8], "six of a and three of b"


def test_fair_serves_a_tenants_greater_priority_first() -> None:
    arrivals = [
        {"prompt_len": 20, "max_tokens": 4, "tenant": tenant, "priority": priority}
        for tenant, priority in (("a", 0), ("a", 1), ("b", 0), ("b", 7))
    ]
    assert served_alone("fair", arrivals) == [3, 1, 0, 2]


@pytest.mark.parametrize("policy", ["fcfs", "srtf", "fair"])
def test_only_priorities_park_others(policy: str) -> None:
    simulation = Simulation(ROWS * 20, max_num_seqs=1, tokens=64, scheduling_policy=policy)
    running = simulation.add(20, 30, tenant="a")
    simulation.step()
    urgent = simulation.add(4, 2, priority=9, tenant="b")
    assert finish_order(simulation, [running, urgent]) == [0, 1]
    assert simulation.scheduler.running.num_preemptions == 0


class TestUrgent:
    """A greater priority enters within one step, by parking the lowest that runs."""

    @pytest.mark.parametrize("scarce", ["slots", "blocks", "budget"])
    def test_enters_in_the_next_step(self, scarce: str) -> None:
        blocks = ROWS * (24 if scarce == "blocks" else 200)
        slots = 3 if scarce == "slots" else 8
        simulation = Simulation(blocks, slots, tokens=32, chunk=32 if scarce == "budget" else 16)
        running = []
        for priority, length in ((2, 20), (0, 20), (1, 200 if scarce == "budget" else 20)):
            running.append(simulation.add(length, 30, priority=priority))
            simulation.step()
            simulation.step()
        assert len(simulation.scheduler.running) == 3
        urgent = simulation.add(28, 4, priority=3)
        step = simulation.step()
        assert urgent.sequences[0] in step.sequences
        parked = [0, 0, 0] if scarce == "budget" else [0, 1, 0]
        assert [request.metrics.num_preemptions for request in running] == parked
        simulation.run()
        assert len(simulation.finished) == 4

    def test_several_enter_in_one_step(self) -> None:
        simulation = Simulation(ROWS * 30, max_num_seqs=3, tokens=64)
        for _ in range(3):
            simulation.add(20, 30)
        for _ in range(3):
            simulation.step()
        urgent = [simulation.add(20, 4, priority=1) for _ in range(2)]
        step = simulation.step()
        assert {each.sequences[0] for each in urgent} <= set(step.sequences)
        assert simulation.scheduler.running.num_preemptions == 2

    def test_nobody_is_parked_in_vain(self) -> None:
        # 20 blocks a row: the lower one holds 6, the equal one 11, and the newcomer needs 12.
        simulation = Simulation(ROWS * 20, tokens=64)
        equal, lower = simulation.add(40, 20, priority=1), simulation.add(20, 20)
        for _ in range(4):
            simulation.step()
        newcomer = simulation.add(44, 4, priority=1)
        simulation.step()
        assert newcomer.sequences[0] in simulation.scheduler.waiting
        assert lower.metrics.num_preemptions == equal.metrics.num_preemptions == 0

    def test_a_parked_one_does_not_park_in_turn(self) -> None:
        simulation = Simulation(ROWS * 20, max_num_seqs=1, tokens=64, aging=0.001)
        low = simulation.add(20, 30)
        for _ in range(20):
            simulation.step()
        urgent = simulation.add(20, 30, priority=100)
        simulation.run()
        assert (low.metrics.num_preemptions, urgent.metrics.num_preemptions) == (1, 0)

    def test_a_whole_prompt_parks_nobody_where_the_step_has_no_tokens_for_it(self) -> None:
        simulation = Simulation(ROWS * 30, tokens=32, chunk=None)
        simulation.add(30, 30)
        simulation.step()
        simulation.add(60, 4, priority=1)
        simulation.step()
        assert simulation.scheduler.running.num_preemptions == 0
        simulation.run()


@pytest.mark.parametrize(("policy", "late"), [("priority", (8, 2)), ("srtf", (40, 20))])
@pytest.mark.parametrize("aging", [None, 0.02])
def test_with_aging_nobody_starves(policy: str, late: tuple[int, int], aging: float | None) -> None:
    """One that comes after all others starts though these keep coming, but for want of aging."""
    simulation = Simulation(ROWS * 20, max_num_seqs=1, tokens=64, aging=aging, scheduling_policy=policy)
    last = simulation.add(*late)
    for _ in range(400):
        if len(simulation.scheduler.waiting) < 3:
            simulation.add(8, 2, priority=3 * (policy == "priority"))
        simulation.step()
    assert last.finished == (aging is not None)


class TestWatermarks:
    def test_requests_join_only_up_to_the_high_one(self) -> None:
        simulation = Simulation(ROWS * 40, tokens=256, chunk=None, watermark_high=0.5)
        for _ in range(5):
            simulation.add(20, 8)
        simulation.step()
        # 5 blocks a row each, and one more promised to each that runs: 3 of them are 17 of 20
        assert len(simulation.scheduler.running) == 3
        simulation.run()

    def test_one_that_is_alone_may_fill_everything(self) -> None:
        simulation = Simulation(ROWS * 20, tokens=256, chunk=None, watermark_high=0.5)
        simulation.add(60, 15)
        simulation.run()
        assert [s.finish_reason for s in simulation.finished] == ["length"]

    def test_once_held_back_they_wait_for_the_low_one(self) -> None:
        """Three of eight fit; as they end one after the other, the next ones start only when use is down."""
        seen = {}
        for low in (None, 0.2):
            simulation = Simulation(ROWS * 20, tokens=256, chunk=None, watermark_high=0.9, watermark_low=low)
            for length in (4, 8, 12, 16, 12, 12, 12, 12):
                simulation.add(16, length)
            used, joined = 0.0, []
            while simulation.scheduler.has_unfinished:
                used = simulation.scheduler.ledger.allocator.num_used / (ROWS * 20)
                before = len(simulation.executor.plans)
                simulation.step()
                if any(simulation.executor.plans[i].new_sequences for i in range(before, before + 1)):
                    joined.append(used)
            seen[low] = joined
        assert max(seen[0.2]) <= 0.2 < max(seen[None])

    def test_above_the_threshold_one_of_several_gives_way(self) -> None:
        """Two of 16 + 50 tokens need 34 of 40 blocks a row at their ends, one alone may go above."""
        most, preempted = {}, {}
        for threshold in (1.0, 0.6):
            simulation = Simulation(ROWS * 40, tokens=256, watermark_high=0.5, watermark_preempt=threshold)
            for _ in range(2):
                simulation.add(16, 50)
            together = [0]
            while simulation.scheduler.has_unfinished:
                simulation.step()
                if len(simulation.scheduler.running) > 1:
                    together.append(simulation.scheduler.ledger.allocator.num_used)
            most[threshold] = max(together) / (ROWS * 40)
            preempted[threshold] = any(s.num_tokens_preempted for s in simulation.finished)
            assert len(simulation.finished) == 2
        assert most[0.6] <= 0.6 < most[1.0]
        assert preempted == {1.0: False, 0.6: True}

    def test_they_compute_everything_nonetheless(self) -> None:
        simulation = Simulation(ROWS * 20, tokens=64, watermark_high=0.3, watermark_low=0.1)
        for length in (4, 70, 30, 8, 50):
            simulation.add(length, 8)
        simulation.run()
        assert len(simulation.finished) == 5


@settings(max_examples=12)
@given(
    data=st.data(),
    policy=st.sampled_from(POLICIES),
    aging=st.sampled_from([None, 0.01, 60.0]),
    watermark=st.sampled_from([0.3, 0.8, 1.0]),
    max_num_seqs=st.integers(1, 6),
    chunk=st.one_of(st.none(), st.integers(4, 64)),
)
def test_no_step_is_idle_while_something_could_run(
    data: st.DataObject,
    policy: str,
    aging: float | None,
    watermark: float,
    max_num_seqs: int,
    chunk: int | None,
) -> None:
    """Whatever the order, every step computes something until all is done, and every request ends once."""
    blocks_per_row = data.draw(st.integers(12, 60))
    simulation = Simulation(
        ROWS * blocks_per_row,
        max_num_seqs,
        tokens=48,
        chunk=chunk,
        scheduling_policy=policy,
        aging=aging,
        watermark_high=watermark,
        watermark_low=watermark / 2,
        tenants={"a": {"guarantee": 0.4, "limit": 0.9}, "b": {"weight": 3, "limit": 0.8}},
    )
    wanted = 0
    for _ in range(data.draw(st.integers(1, 14))):
        most = int(blocks_per_row * 0.8) * BLOCK
        prompt = data.draw(st.integers(1, most - 2))
        answer = data.draw(st.integers(1, min(30, most - prompt + 1)))
        n = data.draw(st.sampled_from([1, 1, 1, 3]))
        simulation.add(
            prompt,
            answer,
            n,
            priority=data.draw(st.sampled_from([0, 0, 1, 5])),
            tenant=data.draw(st.sampled_from([None, "a", "b"])),
        )
        wanted += n
        for _ in range(data.draw(st.integers(0, 4))):
            if simulation.scheduler.has_unfinished:
                assert simulation.step().sequences, "an idle step"
    while simulation.scheduler.has_unfinished:
        assert simulation.step().sequences, "an idle step"
        assert len(simulation.steps) < 20_000
    assert len(simulation.finished) == len(set(simulation.finished)) == wanted
    assert all(s.num_output_tokens == s.request.max_tokens for s in simulation.finished)
    assert simulation.scheduler.ledger.allocator.num_used == 0
    assert not simulation.scheduler.waiting.num_tokens


class TestQueueOrder:
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 50)), max_size=30))
    def test_iteration_first_and_removal_agree(self, arrivals: list[tuple[str, int, int]]) -> None:
        order = Fair({"a": 2.0})
        queue = WaitingQueue(order)
        for index, (tenant, priority, length) in enumerate(arrivals):
            request = Request(
                str(index),
                None,
                [1] * length,
                SamplingParams(),
                4,
                RequestMetrics(float(index)),
                priority=priority,
                tenant=tenant,
            )
            queue.add(request)
            order.charge(tenant, length, 0)
        while queue:
            everyone = list(queue)
            assert len(everyone) == len(queue)
            assert queue.first is everyone[0]
            assert queue.num_tokens == sum(s.num_tokens for s in everyone)
            ranks = [(order.tenant_rank(s.request.tenant), order.rank(s)) for s in everyone]
            assert ranks == sorted(ranks)
            gone: Sequence = everyone[len(everyone) // 2]
            queue.remove(gone)
            queue.remove(gone)
            assert gone not in queue
        assert queue.first is None and queue.tenants == []
