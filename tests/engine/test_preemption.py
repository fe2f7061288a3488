"""Preemption with a host tier, under a virtual clock: how sequences give way, who does, and that nothing leaks."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from round_policies import POLICIES, PRESSURE
from simulated import BLOCK, ROWS, Simulation

from winnow.cache import CopyDiscarded
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.plan import StepPlan, StepResult
from winnow.engine.requests.request import Request

SWAP, RECOMPUTE = SwapCosts(1e-12, 1.0), SwapCosts(1.0, 1e-12)
PLENTY = 10**9


def crowded(
    host_bytes: int = PLENTY, costs: SwapCosts = SWAP, **options: int
) -> tuple[Simulation, Request, Request]:
    """Two requests that both fit at first and cannot both finish: the second gives way."""
    simulation = Simulation(ROWS * 18, tokens=64, chunk=None, host_bytes=host_bytes, costs=costs, **options)
    return simulation, simulation.add(32, 16), simulation.add(32, 16)


def ends_well(simulation: Simulation, num_sequences: int) -> None:
    simulation.run()
    assert len(simulation.finished) == len(set(simulation.finished)) == num_sequences
    assert all(s.num_output_tokens == s.request.max_tokens for s in simulation.finished)
    ledger = simulation.scheduler.ledger
    assert ledger.allocator.num_used == ledger.host.used_bytes == 0 and not simulation.executor.saved


def num_computed(simulation: Simulation, request: Request) -> int:
    """Tokens computed of a request, those that were computed again too."""
    return sum(
        entry.count
        for step in simulation.steps
        for entry, sequence in zip(step.plan.entries, step.sequences, strict=True)
        if sequence.request is request
    )


class TestHow:
    def test_a_swapped_sequence_computes_each_token_once(self) -> None:
        simulation, old, new = crowded()
        ends_well(simulation, 2)
        assert old.metrics.num_preemptions == 0
        assert new.metrics.num_preemptions == new.metrics.num_swaps == 1
        assert num_computed(simulation, new) == 32 + 16 - 1
        layout = simulation.scheduler.ledger.layout
        blocks = layout.blocks_for(32 + 4)
        assert new.metrics.swap_bytes_out == new.metrics.swap_bytes_in == layout.host_bytes([blocks]) + 100
        assert new.metrics.swap_seconds == pytest.approx(2e-9 * blocks * layout.block_bytes)
        assert new.metrics.recomputed_tokens == 0
        total = simulation.scheduler.memory.swap.total
        assert (total["num_swaps"], total["swap_bytes_out"]) == (1, new.metrics.swap_bytes_out)

    def test_the_cheaper_way_is_taken(self) -> None:
        simulation, _, new = crowded(costs=RECOMPUTE)
        ends_well(simulation, 2)
        assert new.metrics.num_preemptions == 1 and new.metrics.num_swaps == 0
        assert num_computed(simulation, new) - (32 + 16 - 1) == new.metrics.recomputed_tokens == 36
        assert 0 < new.metrics.recompute_seconds < simulation.clock()

    def test_what_copies_and_steps_cost_decides(self) -> None:
        for seconds_per_byte, swaps in ((1e-9, True), (1.0, False)):
            simulation = Simulation(ROWS * 18, tokens=64, chunk=None, host_bytes=PLENTY, costs=SwapCosts())
            simulation.executor.seconds_per_byte = seconds_per_byte
            for _ in range(3):
                simulation.add(32, 16)
                simulation.add(32, 16)
                simulation.run()
            ends_well(simulation, 6)
            # The first copy is what shows that copies are slow.
            assert simulation.scheduler.running.num_preemptions == 3
            assert simulation.scheduler.memory.swap.total["num_swaps"] == (3 if swaps else 1)

    def test_a_compressed_sequence_is_swapped_whatever_it_costs(self) -> None:
        simulation = Simulation(ROWS * 60, tokens=64, chunk=None, host_bytes=PLENTY, costs=RECOMPUTE)
        requests = [simulation.add(32, 20, policy=PRESSURE, budget=24) for _ in range(3)]
        while not all(s.kv.last_round for r in requests for s in r.sequences):
            simulation.step()
        simulation.scheduler.running.preempt(requests[1].sequences[0])
        held = simulation.scheduler.ledger.host.copies
        assert requests[1].metrics.num_swaps == len(held) == 1
        ends_well(simulation, 3)

    @pytest.mark.parametrize("host_bytes", [0, 1000])
    def test_without_room_on_the_host_tokens_are_computed_again(self, host_bytes: int) -> None:
        simulation, _, new = crowded(host_bytes=host_bytes)
        ends_well(simulation, 2)
        assert new.metrics.num_preemptions == 1 and new.metrics.num_swaps == 0
        assert new.metrics.recomputed_tokens == 36

    def test_copies_are_private(self) -> None:
        """Samples share a prompt; one of them that is swapped comes back with blocks of its own."""
        simulation = Simulation(ROWS * 40, tokens=64, chunk=None, host_bytes=PLENTY, costs=SWAP)
        request = simulation.add(32, 16, n=2)
        simulation.step()
        ledger, (stays, goes) = simulation.scheduler.ledger, request.sequences
        simulation.scheduler.running.preempt(goes)
        assert ledger.host.copies[goes.kv.host_id].num_blocks == ROWS * 32 // BLOCK
        assert not ledger.is_shared(stays.kv.running_slot)
        simulation.step()
        assert not ledger.is_shared(goes.kv.running_slot)
        ends_well(simulation, 2)


class TestFaults:
    def test_a_copy_that_cannot_be_made(self) -> None:
        simulation, old, new = crowded()
        simulation.executor.fails = 1
        ends_well(simulation, 2)
        assert new.metrics.num_preemptions == 1 and new.metrics.num_swaps == 0
        assert new.metrics.recomputed_tokens == 36 and num_computed(simulation, old) == 32 + 16 - 1

    def test_a_copy_that_does_not_come_back(self) -> None:
        simulation, old, new = crowded()
        while not new.metrics.num_swaps:
            simulation.step()
        simulation.executor.fails = 1
        ends_well(simulation, 2)
        assert new.metrics.recomputed_tokens == 36 and new.metrics.swap_bytes_in == 0
        assert num_computed(simulation, old) == 32 + 16 - 1

    @pytest.mark.parametrize("when", ["out", "in"])
    def test_an_interrupted_copy(self, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
        simulation, _, new = crowded()
        if when == "in":
            while not new.metrics.num_swaps:
                simulation.step()
        apply = simulation.executor.apply
        raised = []

        def interrupt(update: object) -> None:
            apply(update)  # type: ignore[arg-type]
            if update.copies and not raised:  # type: ignore[attr-defined]
                raised.append(update)
                raise KeyboardInterrupt

        monkeypatch.setattr(simulation.executor, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            simulation.run()
        ends_well(simulation, 2)

    def test_cancelled_while_it_is_swapped(self) -> None:
        simulation, _, new = crowded()
        while not new.metrics.num_swaps:
            simulation.step()
        [sequence] = new.sequences
        held = simulation.scheduler.ledger.host.copies[sequence.kv.host_id].lengths
        simulation.scheduler.running.finish(sequence, "abort")
        assert np.array_equal(sequence.kept, held), "what it held when it ended"
        assert simulation.scheduler.ledger.host.used_bytes == 0
        ends_well(simulation, 1)

    def test_a_step_that_raises_leaves_swapped_ones_alone(self) -> None:
        simulation, old, new = crowded()
        while not new.metrics.num_swaps:
            simulation.step()
        simulation.scheduler.running.recompute_all()
        ends_well(simulation, 2)
        assert num_computed(simulation, new) == 32 + 16 - 1, "its copy is from before that step"
        assert old.metrics.recomputed_tokens > 0 and old.metrics.num_preemptions == 0

    def test_a_step_that_raises_before_it_follows_its_update_loses_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        simulation, _, _ = crowded()
        submit = simulation.executor.submit
        raised = []

        def fail(plan: StepPlan) -> StepResult:
            if any(isinstance(copies, CopyDiscarded) for copies in plan.update.copies) and not raised:
                raised.append(plan)
                raise RuntimeError("no memory")
            return submit(plan)

        monkeypatch.setattr(simulation.executor, "submit", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            simulation.run()
        simulation.scheduler.running.recompute_all()
        ends_well(simulation, 2)

    def test_a_swapped_one_that_finds_no_room_even_alone_computes_its_tokens_again(self) -> None:
        simulation, old, new = crowded()
        while not new.metrics.num_swaps:
            simulation.step()
        simulation.scheduler.running.finish(old.sequences[0], "abort")
        copies, host_id = simulation.scheduler.ledger.host.copies, new.sequences[0].kv.host_id
        free, copy = simulation.scheduler.ledger.allocator.num_free, copies[host_id]
        assert copy.num_blocks < free
        simulation.scheduler.memory.swap.fits = lambda sequence: False  # type: ignore[method-assign]
        ends_well(simulation, 1)
        assert new.metrics.recomputed_tokens == 36


class TestWho:
    def test_the_lowest_priority_then_least_loss_per_byte(self) -> None:
        simulation = Simulation(
            ROWS * 60, tokens=128, chunk=None, host_bytes=PLENTY, costs=SwapCosts(1, 1e-3)
        )
        urgent = simulation.add(16, 40, priority=1)
        # 4 blocks of 15 tokens, 4 of 16, and 5 of 17: a block in use for few tokens is cheap to free.
        dear, dearest, cheap = simulation.add(14, 40), simulation.add(15, 40), simulation.add(16, 40)
        for _ in range(2):
            simulation.step()
        scheduler = simulation.scheduler
        loss = scheduler.memory.swap.loss
        losses = [loss(request.sequences[0]) for request in (cheap, dear, dearest)]
        assert losses == sorted(losses) and losses[0] < losses[1]
        for victim in (cheap, dear, dearest, urgent):
            scheduler.running.preempt()
            assert victim.metrics.num_preemptions == 1
        ends_well(simulation, 4)

    def test_a_lower_priority_gives_way_before_a_lesser_loss(self) -> None:
        simulation = Simulation(ROWS * 60, tokens=128, chunk=None, host_bytes=PLENTY, costs=RECOMPUTE)
        # 13 tokens take the same blocks as 15, so they are lost for less.
        served = simulation.add(16, 40, priority=2)
        cheap, dear = simulation.add(13, 40, priority=1), simulation.add(15, 40)
        for _ in range(2):
            simulation.step()
        scheduler = simulation.scheduler
        lost = [scheduler.memory.swap.loss(request.sequences[0]) for request in (cheap, dear)]
        assert lost[0] < lost[1], "else this shows nothing"
        scheduler.running.preempt()
        assert [each.metrics.num_preemptions for each in (served, cheap, dear)] == [0, 0, 1]
        ends_well(simulation, 3)

    def test_who_has_just_come_back_is_spared(self) -> None:
        simulation = Simulation(ROWS * 60, tokens=128, chunk=None, host_bytes=PLENTY, costs=SWAP)
        first, second, third = (simulation.add(16, 40) for _ in range(3))
        simulation.step()
        scheduler = simulation.scheduler
        scheduler.running.preempt()
        assert third.metrics.num_preemptions == 1
        for _ in range(BLOCK - 1):
            simulation.step()
        scheduler.running.preempt()
        assert second.metrics.num_preemptions == 1 and third.metrics.num_preemptions == 1
        for _ in range(BLOCK):
            simulation.step()
        scheduler.running.preempt()
        assert third.metrics.num_preemptions == 2 and first.metrics.num_preemptions == 0
        ends_well(simulation, 3)


class TestMeasuredCosts:
    def test_prompts_are_fitted_by_tokens_and_kvs_read(self) -> None:
        costs = SwapCosts()
        simulation = Simulation(ROWS * 200, tokens=64, chunk=32)
        for length in (32, 64, 128, 300):
            simulation.add(length, 1)
        assert costs.recompute_seconds(10) is None and costs.swap_seconds(10) is None
        while simulation.scheduler.has_unfinished:
            plan = simulation.step().plan
            read = sum(e.count * (e.start + e.end + 1) / 2 for e in plan.entries)
            costs.record_step(plan, 1e-4 * plan.num_tokens + 1e-6 * read)
        found = costs.recompute_seconds(200)
        assert found == pytest.approx(200 * 1e-4 + 200 * 201 / 2 * 1e-6)

    def test_recent_copies_weigh_more(self) -> None:
        costs = SwapCosts()
        costs.record_copy(1000, 1.0, back=False)
        assert costs.swap_seconds(1000) == pytest.approx(2.0)
        costs.record_copy(1000, 3.0, back=True)
        assert costs.swap_seconds(1000) == pytest.approx(4.0)
        for _ in range(100):
            costs.record_copy(1000, 2.0, back=False)
        assert costs.swap_seconds(1000) == pytest.approx(5.0, rel=0.01)


@settings(max_examples=12)
@given(
    data=st.data(),
    blocks_per_row=st.integers(12, 60),
    max_num_seqs=st.integers(1, 8),
    tokens=st.integers(8, 64),
    chunk=st.one_of(st.none(), st.integers(8, 64)),
    cap=st.sampled_from([None, 1, 200]),
    host_blocks=st.integers(0, 600),
    costs=st.sampled_from([SWAP, RECOMPUTE]),
)
def test_everything_finishes_whatever_arrives(
    data: st.DataObject,
    blocks_per_row: int,
    max_num_seqs: int,
    tokens: int,
    chunk: int | None,
    cap: int | None,
    host_blocks: int,
    costs: SwapCosts,
) -> None:
    """With policies, samples, cancellations, failing copies, and preemptions at any time."""
    blocks, host_bytes = ROWS * blocks_per_row, host_blocks * 200
    simulation = Simulation(blocks, max_num_seqs, tokens, chunk, cap, host_bytes, costs)
    scheduler, wanted, requests = simulation.scheduler, 0, []
    for _ in range(data.draw(st.integers(1, 10))):
        policy = data.draw(st.sampled_from([None, *POLICIES]))
        longest = (
            blocks_per_row * BLOCK - 2 if policy is None else blocks_per_row * BLOCK // 3
        )  # replays fit, too
        prompt = data.draw(st.integers(1, longest))
        answer = data.draw(st.integers(1, min(30, blocks_per_row * BLOCK - prompt + 1)))
        n = data.draw(st.sampled_from([1, 1, 1, 2, 4, 8]))
        priority = data.draw(st.sampled_from([0, 0, -1, 5]))
        requests.append(simulation.add(prompt, answer, n, policy, 18, priority))
        wanted += n
        for _ in range(data.draw(st.integers(0, 6))):
            if scheduler.has_unfinished:
                simulation.step()
            what = data.draw(st.integers(0, 9))
            if what == 0 and len(scheduler.running) > 1:
                scheduler.running.preempt(data.draw(st.sampled_from(scheduler.running)))
            elif what == 1:
                simulation.executor.fails = 1
            elif what == 2 and (waiting := [s for s in scheduler.waiting if s.kv.host_id is not None]):
                wanted -= 1 + len(waiting[0].forks)  # samples that never got a slot end with it
                scheduler.running.finish(waiting[0], "abort")
            elif what == 3:
                scheduler.running.recompute_all()
    ends_well(simulation, wanted)
    assert scheduler.ledger.num_free_slots == max_num_seqs and scheduler.ledger.peak_blocks <= blocks
