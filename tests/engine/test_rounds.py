"""When rounds fall, who takes part, and what the scheduler makes of the blocks they free."""

import random

import pytest
from round_policies import AFTER, BATCH_MAX, EVERY_8, LISTENING, PRESSURE, UNEVEN
from simulated import ROWS, Simulation

from winnow.engine.requests.request import Request
from winnow.eviction import EvictionPolicy, When


def rounds_of(simulation: Simulation, request: Request) -> list[int]:
    """Token counts at which the request's sequences had rounds; told apart by the length of their prompts."""
    return [
        member.computed
        for members in simulation.executor.rounds
        for member in members
        if member.eviction.prompt_len == len(request.prompt_token_ids)
    ]


def longest_row(simulation: Simulation) -> int:
    return int(simulation.scheduler.ledger.lengths.max())


def run_and_watch(simulation: Simulation) -> int:
    """Run to the end. Returns the most KVs that any row ever held."""
    most = 0
    while simulation.scheduler.has_unfinished:
        simulation.step()
        most = max(most, longest_row(simulation))
    return most


def test_after_the_prompt_once() -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(40, 10, policy=AFTER)
    assert run_and_watch(simulation) == 40
    assert rounds_of(simulation, request) == [40]


def test_within_the_prompt_and_while_decoding() -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(37, 12, policy=EVERY_8, budget=10)
    # the limit is 10 + 8; then every 8 tokens, at the prompt's end, and every 4 tokens of the answer
    assert run_and_watch(simulation) == 18
    assert rounds_of(simulation, request) == [18, 26, 34, 37, 41, 45]


def test_batch_max_never_exceeds_its_budget() -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(50, 20, policy=BATCH_MAX, budget=20)
    assert run_and_watch(simulation) == 20
    # Algorithm 1: full at 20, 28, 36, 44; then the prompt's last 6 leave 18, and decoding fills it at 52, 60, 68
    assert rounds_of(simulation, request) == [20, 28, 36, 44, 52, 60, 68]


def test_what_a_policy_takes_back_is_room_for_newcomers() -> None:
    """Four answers at the most that their policy lets them hold need no further block before a round."""
    most = 3 * ROWS  # 8 KVs and 4 more a row, in blocks of 4
    simulation = Simulation(num_blocks=5 * most)
    for _ in range(4):
        simulation.add(8, 20, policy=EVERY_8, budget=8)
    simulation.step()
    simulation.step()
    assert simulation.scheduler.ledger.allocator.num_free == most
    simulation.add(8, 20, policy=EVERY_8, budget=8)
    simulation.step()
    assert len(simulation.scheduler.running) == 5
    simulation.run()
    assert simulation.scheduler.running.num_preemptions == 0


def test_rounds_do_not_depend_on_what_else_runs() -> None:
    lengths = [(61, 9), (33, 30), (47, 3), (90, 5), (52, 17)]
    alone = []
    for prompt_len, max_tokens in lengths:
        simulation = Simulation(num_blocks=400, tokens=1000, chunk=None)
        request = simulation.add(prompt_len, max_tokens, policy=EVERY_8, budget=10)
        simulation.run()
        alone.append(rounds_of(simulation, request))
    together = Simulation(num_blocks=60 * ROWS, tokens=19, chunk=5)
    requests = [together.add(n, m, policy=EVERY_8, budget=10) for n, m in lengths]
    together.run()
    assert [rounds_of(together, request) for request in requests] == alone


def test_a_prompt_longer_than_the_pool() -> None:
    simulation = Simulation(num_blocks=ROWS * 6, max_num_seqs=2)  # 24 KVs a row
    request = simulation.add(300, 40, policy=EVERY_8, budget=10)
    assert run_and_watch(simulation) == 18
    assert request.finished
    assert simulation.scheduler.running.num_preemptions == 0


def test_rows_far_longer_than_the_pool_is_wide() -> None:
    """Tables have room for a row that takes all, so a request whose rows differ never waits for what cannot come."""
    simulation = Simulation(num_blocks=ROWS * 16, max_num_seqs=1)
    for prompt_len in (350, 20, 360):
        simulation.add(prompt_len, 20, policy=UNEVEN, budget=24)
    assert run_and_watch(simulation) == 4 * 24 + 8, "one row kept what four may, and got 8 more"
    assert len(simulation.finished) == 3
    simulation.scheduler.ledger.check_integrity()


def test_admission_counts_on_what_a_policy_holds_at_most() -> None:
    # Room for 48 KVs a row: one prompt of 40 without a policy, but two that never hold more than 18.
    def running_after_a_step(policy: EvictionPolicy | None) -> int:
        simulation = Simulation(num_blocks=ROWS * 12, tokens=64, chunk=None)
        for _ in range(3):
            simulation.add(40, 4, policy=policy, budget=10)
        simulation.step()
        return len(simulation.scheduler.running)

    assert running_after_a_step(None) == 1
    assert running_after_a_step(EVERY_8) == 2


def test_blocks_of_a_round_are_used_in_the_same_step() -> None:
    # 10 blocks a row. The prompt takes all of them; its round leaves 2, and the next prompt enters in that very step.
    simulation = Simulation(num_blocks=ROWS * 10, max_num_seqs=4)
    simulation.add(40, 5, policy=AFTER, budget=8)
    simulation.add(12, 2)
    while not simulation.executor.rounds:
        step = simulation.step()
    counts = [entry.count for entry in step.plan.entries]
    assert [(s.request.request_id, count) for s, count in zip(step.sequences, counts, strict=True)] == [
        ("0", 1),
        ("1", 12),
    ]


def test_pressure_compresses_before_anyone_is_preempted() -> None:
    def preemptions(policy: EvictionPolicy) -> int:
        simulation = Simulation(num_blocks=ROWS * 14, max_num_seqs=4)
        for _ in range(2):
            simulation.add(20, 40, policy=policy, budget=12)
        simulation.run()
        assert len(simulation.finished) == 2
        return simulation.scheduler.running.num_preemptions

    assert preemptions(AFTER) > 0
    assert preemptions(PRESSURE) == 0


def prompts_then_answers(when: When) -> Simulation:
    """30 prompts of 80 to 100 tokens that leave 8 KVs a row, answers of 20 to 60 tokens, room for 240 KVs a row."""
    simulation = Simulation(num_blocks=ROWS * 60, max_num_seqs=32)
    rng = random.Random(0)
    for _ in range(30):
        simulation.add(rng.randint(80, 100), rng.randint(20, 60), policy=EvictionPolicy(when=when))
    simulation.run()
    assert len(simulation.finished) == 30
    assert simulation.scheduler.running.num_preemptions == 0
    return simulation


def test_the_round_after_a_prompt_takes_in_all_that_run() -> None:
    """What the answers have gathered is room for the next prompts: a third of the steps less (KV-Compress 4.2.3)."""
    newcomer_alone = prompts_then_answers(When(after_prefill=True, pressure=True))
    all_of_them = prompts_then_answers(When(after_prefill=True, pressure=True, join_prefill=True))
    steps = [len(simulation.executor.plans) for simulation in (newcomer_alone, all_of_them)]
    assert steps[1] <= 0.7 * steps[0]


def test_rounds_are_joined_in_order_of_the_last_one_and_within_one_policy() -> None:
    joins = EvictionPolicy(when=When(after_prefill=True, join_prefill=True))
    simulation = Simulation(num_blocks=4000)
    first = simulation.add(20, 40, policy=joins)
    other = simulation.add(20, 40, policy=PRESSURE)
    for _ in range(4):
        simulation.step()
    second = simulation.add(24, 40, policy=joins)
    for _ in range(4):
        simulation.step()
    simulation.add(28, 40, policy=joins)
    simulation.run()
    lengths = [[m.eviction.prompt_len for m in members] for members in simulation.executor.rounds]
    assert lengths == [[20, 20], [24, 20], [28, 24, 20]]
    assert rounds_of(simulation, second)[0] == 24
    assert len(rounds_of(simulation, first)) == 4, "of both prompts of 20 tokens: the other policy's had one"
    assert other.finished


def test_a_joined_round_within_the_cap_makes_nobody_wait() -> None:
    joins = EvictionPolicy(when=When(after_prefill=True, join_prefill=True))
    simulation = Simulation(num_blocks=4000, max_num_seqs=4, tokens=400, chunk=None, max_round_kvs=30 * ROWS)
    for _ in range(4):
        simulation.add(24, 12, policy=joins)
        simulation.step()
        simulation.step()
    simulation.run()
    assert max(len(members) for members in simulation.executor.rounds) == 1
    # Each but the first waits for nothing but its own turn: two steps from one to the next, then 12 tokens.
    assert len(simulation.executor.plans) == 2 * 3 + 12


def test_room_is_made_for_a_prompt_that_waits() -> None:
    def first_plan_of_the_second(when: When) -> int:
        simulation = Simulation(num_blocks=ROWS * 16, max_num_seqs=4)
        simulation.add(20, 40, policy=EvictionPolicy(when=when))
        while (
            simulation.scheduler.running[:1] == [] or simulation.scheduler.running[0].num_output_tokens < 30
        ):
            simulation.step()
        second = simulation.add(40, 5)
        simulation.run()
        return next(
            n for n, step in enumerate(simulation.steps) if any(s.request is second for s in step.sequences)
        )

    # 8 KVs were left and 30 more gathered: 10 blocks a row of 16, and the prompt needs 10.
    waited, made = (
        first_plan_of_the_second(When(after_prefill=True, make_room=make_room)) for make_room in (False, True)
    )
    assert waited - made >= 8, "it need not wait until the first has ended"


def test_room_is_not_made_where_it_would_not_suffice() -> None:
    simulation = Simulation(num_blocks=ROWS * 16, max_num_seqs=4)
    simulation.add(20, 40, policy=EvictionPolicy(when=When(after_prefill=True, make_room=True)))
    simulation.step()
    simulation.add(62, 2)
    simulation.run()
    assert len(simulation.executor.rounds) == 1


def test_every_so_many_steps_all_at_once() -> None:
    policy = EvictionPolicy(when=When(every_steps=5))
    simulation = Simulation(num_blocks=400)
    for prompt_len in (9, 10):
        simulation.add(prompt_len, 12, policy=policy)
    simulation.run()
    # step 1 computes the prompts; steps 5 and 10 begin with rounds
    assert [[(m.eviction.prompt_len, m.computed) for m in r] for r in simulation.executor.rounds] == [
        [(9, 12), (10, 13)],
        [(9, 17), (10, 18)],
    ]


def test_when_so_many_tokens_have_gathered() -> None:
    policy = EvictionPolicy(when=When(uncompressed_tokens=30))
    simulation = Simulation(num_blocks=400)
    for prompt_len in (9, 10):
        simulation.add(prompt_len, 14, policy=policy)
    simulation.run()
    # 19 tokens of the prompts and 2 a step: 31 after 6 steps of decoding; then too few gather again
    assert [[m.computed for m in r] for r in simulation.executor.rounds] == [[15, 16]]


def test_a_round_has_a_cap_and_nobody_starves() -> None:
    # Each holds 24 KVs in 4 rows when its round is due; the cap lets two in, and the rest wait their turn.
    simulation = Simulation(
        num_blocks=4000, max_num_seqs=8, tokens=400, chunk=None, max_round_kvs=2 * 24 * ROWS
    )
    requests = [simulation.add(24, 30, policy=EVERY_8, budget=20) for _ in range(6)]
    longest = run_and_watch(simulation)
    assert all(request.finished for request in requests)
    assert max(len(members) for members in simulation.executor.rounds) == 2
    assert longest == 24, "who waits for a round computes nothing beyond it"
    served = [member.slot for members in simulation.executor.rounds for member in members]
    assert served[:6] == list(range(6)), "first come, first served"
    counts = [served.count(slot) for slot in range(6)]
    assert max(counts) - min(counts) <= 1


def test_a_sequence_above_the_cap_goes_alone() -> None:
    simulation = Simulation(num_blocks=4000, max_round_kvs=3)
    request = simulation.add(24, 4, policy=AFTER)
    simulation.run()
    assert request.finished
    assert len(simulation.executor.rounds) == 1


def test_samples_share_what_a_round_leaves() -> None:
    simulation = Simulation(num_blocks=400)
    simulation.add(40, 4, n=3, policy=AFTER, budget=8)
    simulation.step()
    while not simulation.executor.rounds:
        simulation.step()
    assert [len(members) for members in simulation.executor.rounds] == [1], "one decides for all"
    assert simulation.executor.num_copied == 0
    # 2 full blocks a row are shared; each sample has a block of its own for its answer
    assert simulation.scheduler.ledger.allocator.num_used == ROWS * (2 + 3)
    simulation.run()
    assert len(simulation.finished) == 3


def test_samples_whose_policy_goes_on_hold_kvs_of_their_own() -> None:
    simulation = Simulation(num_blocks=400)
    simulation.add(40, 6, n=3, policy=LISTENING, budget=8)
    while not simulation.executor.rounds:
        simulation.step()
    assert simulation.executor.num_copied == 2 * 2 * ROWS, (
        "two samples copy the two blocks a row that were left"
    )
    assert not any(
        simulation.scheduler.ledger.is_shared(s.kv.running_slot) for s in simulation.scheduler.running
    )
    simulation.run()
    assert len(simulation.finished) == 3


def test_a_preempted_sequence_has_its_rounds_again_at_the_same_places() -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(37, 20, policy=EVERY_8, budget=10)
    while request.sequences[0].num_output_tokens < 9:
        simulation.step()
    first = rounds_of(simulation, request)
    simulation.scheduler.running.preempt()
    simulation.executor.rounds.clear()
    simulation.run()
    assert rounds_of(simulation, request)[: len(first)] == first


@pytest.mark.parametrize("n", [1, 3])
def test_an_interrupted_round_leaves_a_sound_engine(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(num_blocks=400)
    request = simulation.add(40, 6, n=n, policy=AFTER)

    def interrupted(members: object) -> list[int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simulation.executor, "plan_evictions", interrupted)
        simulation.run()
    simulation.scheduler.ledger.check_integrity()
    assert not simulation.scheduler.running
    simulation.run()
    assert request.finished
