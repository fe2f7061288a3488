"""Tenants: shares of the blocks that are lent and given back, fair service, prefixes of their own."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from simulated import BLOCK, ROWS, Simulation

from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.request import Sequence
from winnow.errors import ConfigError
from winnow.values.tenants import Tenant, parse_tenants


def tenants_of(sequences: list[Sequence]) -> list[str | None]:
    return [sequence.request.tenant for sequence in sequences]


def steps(simulation: Simulation, count: int) -> None:
    for _ in range(count):
        simulation.step()


class TestQuotas:
    def simulation(self, tenants: dict[str, Any], blocks_per_row: int = 40, **options: Any) -> Simulation:
        return Simulation(ROWS * blocks_per_row, tokens=256, chunk=None, tenants=tenants, **options)

    def test_what_others_do_not_use_is_lent(self) -> None:
        simulation = self.simulation({"a": {"guarantee": 0.5}, "b": {"guarantee": 0.25}})
        for _ in range(8):
            simulation.add(16, 8, tenant="b")
        simulation.step()
        assert tenants_of(simulation.scheduler.running) == ["b"] * 8, (
            "all of the cache, with a quarter guaranteed"
        )
        stats = simulation.scheduler.accounts.stats(
            simulation.scheduler.running, simulation.scheduler.waiting
        )
        assert (stats["b"].blocks, stats["b"].guaranteed_blocks) == (ROWS * 32, ROWS * 10)
        assert stats["b"].borrowed_blocks == ROWS * 22
        assert stats["a"].blocks == stats["a"].borrowed_blocks == 0

    @pytest.mark.parametrize("policy", ["fcfs", "priority", "srtf", "fair"])
    def test_and_given_back_within_one_step(self, policy: str) -> None:
        """Also ahead of those of the borrower that came before, whatever the order and their priority."""
        simulation = self.simulation({"a": {"guarantee": 0.5}}, scheduling_policy=policy)
        for _ in range(12):
            simulation.add(16, 30, tenant="b", priority=5)
        steps(simulation, 3)
        back = [simulation.add(32, 8, tenant="a") for _ in range(2)]
        step = simulation.step()
        assert {each.sequences[0] for each in back} <= set(step.sequences)
        assert simulation.scheduler.running.num_preemptions > 0
        held = simulation.scheduler.memory.held(simulation.scheduler.running)
        assert held <= ROWS * 40
        simulation.run()
        assert len(simulation.finished) == 14
        assert all(each.metrics.num_preemptions == 0 for each in back)

    def test_a_guarantee_is_not_given_to_greater_priorities_of_others(self) -> None:
        simulation = self.simulation({"a": {"guarantee": 0.25}}, max_num_seqs=4)
        own = [simulation.add(16, 30, tenant="a") for _ in range(4)]
        simulation.step()
        simulation.add(16, 30, tenant="b", priority=9)
        steps(simulation, 3)
        assert sum(each.metrics.num_preemptions for each in own) == 1, "what a borrowed, and no more"
        simulation.run()

    def test_beyond_its_guarantee_a_tenant_reclaims_nothing(self) -> None:
        simulation = self.simulation({"a": {"guarantee": 0.25}})
        for _ in range(8):
            simulation.add(16, 30, tenant="b")
        simulation.step()
        too_much = simulation.add(44, 4, tenant="a")
        steps(simulation, 3)
        assert too_much.sequences[0] in simulation.scheduler.waiting
        assert simulation.scheduler.running.num_preemptions == 0
        simulation.run()

    def test_a_limit_holds_and_holds_up_nobody_else(self) -> None:
        simulation = self.simulation({"a": {"limit": 0.3}}, scheduling_policy="fcfs")
        for _ in range(6):
            simulation.add(16, 20, tenant="a")
        other = simulation.add(16, 4, tenant="b")
        simulation.step()
        assert tenants_of(simulation.scheduler.running) == ["a", "a", "b"]
        assert other.sequences[0].kv.slot is not None
        while simulation.scheduler.has_unfinished:
            stats = simulation.scheduler.accounts.stats(
                simulation.scheduler.running, simulation.scheduler.waiting
            )
            assert stats["a"].blocks <= stats["a"].limit_blocks == ROWS * 12
            simulation.step()
        assert len(simulation.finished) == 7

    def test_answers_that_grow_beyond_the_limit_give_way_to_their_own(self) -> None:
        simulation = self.simulation({"a": {"limit": 0.3}})
        grown = [simulation.add(12, 32, tenant="a") for _ in range(3)]
        other = simulation.add(12, 32, tenant="b")
        while simulation.scheduler.has_unfinished:
            simulation.step()
            own = [s for s in simulation.scheduler.running if s.request.tenant == "a"]
            assert simulation.scheduler.memory.held(own) <= ROWS * 12
        assert sum(each.metrics.num_preemptions for each in grown) > 0
        assert other.metrics.num_preemptions == 0

    @pytest.mark.parametrize(("tenant", "swaps"), [("a", 0), ("b", 1)])
    def test_the_host_tier_is_limited_per_tenant_too(self, tenant: str, swaps: int) -> None:
        simulation = self.simulation(
            {"a": {"host_limit": 0}}, blocks_per_row=18, costs=SwapCosts(1e-12, 1.0), host_bytes=1_000_000
        )
        simulation.add(32, 16)
        request = simulation.add(32, 16, tenant=tenant)
        scheduler, most = simulation.scheduler, 0
        while scheduler.has_unfinished:
            simulation.step()
            stats = scheduler.accounts.stats(scheduler.running, scheduler.waiting)
            assert stats[tenant].host_bytes == scheduler.ledger.host.used_bytes
            most = max(most, stats[tenant].host_bytes)
        assert (request.metrics.num_preemptions, request.metrics.num_swaps) == (1, swaps)
        assert (most > 0) == bool(swaps)

    def test_who_is_not_named_has_what_the_star_has(self) -> None:
        accounts = self.simulation({"*": {"limit": 0.5}, "a": {"limit": 0.9}}).scheduler.accounts
        assert [accounts.limit(name) for name in ("a", "b", None)] == [144, 80, 80]

    @settings(max_examples=10)
    @given(data=st.data(), guarantee=st.sampled_from([0.3, 0.5]), limit=st.sampled_from([0.6, 1.0]))
    def test_limits_hold_and_guarantees_are_served(
        self, data: st.DataObject, guarantee: float, limit: float
    ) -> None:
        simulation = Simulation(
            ROWS * 40,
            max_num_seqs=16,
            tokens=512,
            chunk=64,
            tenants={"a": {"guarantee": guarantee}, "b": {"limit": limit}},
            scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority", "fair"])),
        )
        scheduler = simulation.scheduler
        for _ in range(data.draw(st.integers(5, 25))):
            for _ in range(data.draw(st.integers(0, 3))):
                simulation.add(data.draw(st.integers(1, 60)), data.draw(st.integers(1, 30)), tenant="b")
            if data.draw(st.integers(0, 3)) == 0 and not any(
                s.request.tenant == "a" for s in (*scheduler.running, *scheduler.waiting)
            ):
                prompt = data.draw(st.integers(1, int(40 * guarantee) * BLOCK))
                mine = simulation.add(prompt, 1, tenant="a")
                assert mine.sequences[0] in simulation.step().sequences, "not within one step"
            elif scheduler.has_unfinished:
                simulation.step()
            own = [s for s in scheduler.running if s.request.tenant == "b"]
            assert scheduler.memory.held(own) <= scheduler.accounts.limit("b")
        simulation.run()


class Service:
    """What two tenants that always have requests waiting got since both began."""

    def __init__(
        self, simulation: Simulation, data: st.DataObject, most_prompt: int, most_answer: int
    ) -> None:
        self.simulation = simulation
        self.data = data
        self.most_prompt, self.most_answer = most_prompt, most_answer

    def arrive(self, tenant: str) -> None:
        prompt = self.data.draw(st.integers(1, self.most_prompt))
        self.simulation.add(prompt, self.data.draw(st.integers(1, self.most_answer)), tenant=tenant)

    def step(self, backlogged: str) -> None:
        for tenant in backlogged:
            while self.simulation.scheduler.waiting.num_of_tenant(tenant) < 3:
                self.arrive(tenant)
        self.simulation.step()

    def of(self, tenant: str, weight: float) -> float:
        scheduler = self.simulation.scheduler
        stats = scheduler.accounts.stats(scheduler.running, scheduler.waiting)[tenant]
        return (stats.prompt_tokens + 2 * stats.output_tokens) / weight


class TestFairness:
    @settings(max_examples=10)
    @given(
        data=st.data(),
        blocks_per_row=st.integers(16, 60),
        max_num_seqs=st.integers(1, 8),
        weights=st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)]),
    )
    def test_two_backlogged_tenants_get_alike(
        self, data: st.DataObject, blocks_per_row: int, max_num_seqs: int, weights: tuple[float, float]
    ) -> None:
        """Service by weight differs by at most twice U = max(w_p L_input, w_q M): Sheng et al., theorem 4.4.

        M is what the cache holds. A third tenant comes and goes, and one of the two may have had the engine alone.
        """
        simulation = Simulation(
            ROWS * blocks_per_row,
            max_num_seqs,
            tokens=64,
            scheduling_policy="fair",
            tenants={"a": {"weight": weights[0]}, "b": {"weight": weights[1]}},
        )
        most_prompt = 40
        service = Service(simulation, data, most_prompt, most_answer=20)
        for _ in range(data.draw(st.integers(0, 30))):
            service.step("a")
        for tenant in "ab":
            service.arrive(tenant)
        start = [service.of(tenant, weight) for tenant, weight in zip("ab", weights, strict=True)]
        bound = 2 * max(most_prompt, 2 * blocks_per_row * BLOCK) / min(weights)
        for _ in range(data.draw(st.integers(50, 90))):
            if data.draw(st.integers(0, 5)) == 0:
                service.arrive("c")
            service.step("ab")
            got = [
                service.of(tenant, weight) - begun
                for tenant, weight, begun in zip("ab", weights, start, strict=True)
            ]
            assert abs(got[0] - got[1]) <= bound

    def test_who_was_away_does_not_catch_up(self) -> None:
        """A tenant that comes late is lifted: it shares from then on, and does not have the engine alone."""
        simulation = Simulation(ROWS * 40, max_num_seqs=2, tokens=64, scheduling_policy="fair")
        for _ in range(60):
            simulation.add(10, 4, tenant="a")
        steps(simulation, 80)
        done = len(simulation.finished)
        for _ in range(60):
            simulation.add(10, 4, tenant="b")
        steps(simulation, 40)
        since = tenants_of(simulation.finished[done:])
        assert abs(since.count("a") - since.count("b")) <= 2

    def test_a_flood_delays_others_little(self) -> None:
        waits = {}
        for policy in ("fcfs", "fair"):
            simulation = Simulation(ROWS * 40, max_num_seqs=2, tokens=64, scheduling_policy=policy)
            for _ in range(50):
                simulation.add(10, 4, tenant="flood")
            quiet = simulation.add(10, 4, tenant="quiet")
            simulation.run()
            waits[policy] = quiet.metrics.first_scheduled_time or 0.0
        assert waits["fair"] < waits["fcfs"] / 10

    def test_recomputing_costs_a_tenant_nothing(self) -> None:
        simulation = Simulation(ROWS * 18, tokens=64, chunk=None, scheduling_policy="fair")
        for tenant in "ab":
            simulation.add(32, 16, tenant=tenant)
        simulation.run()
        assert simulation.scheduler.running.num_preemptions
        order = simulation.scheduler.waiting.order
        assert order.tenant_rank("a") == order.tenant_rank("b") == 32 + 2 * 16


def test_the_same_tenant_hits_and_another_misses() -> None:
    simulation = Simulation(ROWS * 80, tokens=256, prefix_caching=True)
    cached: deque[int] = deque()
    for tenant in ("a", "a", "b", None, None, "b"):
        request = simulation.add(41, 2, tenant=tenant)
        simulation.run()
        cached.append(request.num_cached_tokens)
    assert list(cached) == [0, 40, 0, 0, 40, 40]


class TestConfiguration:
    def test_text_file_and_mapping_say_the_same(self, tmp_path: Any) -> None:
        text = '{"a": {"weight": 2, "guarantee": 0.25, "limit": 0.5}, "b": {}}'
        path = tmp_path / "tenants.json"
        path.write_text(text)
        expected = (Tenant("a", 2, 0.25, 0.5), Tenant("b"))
        assert parse_tenants(text) == parse_tenants(str(path)) == parse_tenants(path) == expected
        assert parse_tenants(expected) == parse_tenants(list(expected)) == expected

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ('{"a": {"wieght": 2}}', "a has an unknown field 'wieght'. did you mean weight"),
            ('{"a": {"weight": 0}}', "weight of a must be at least"),
            ('{"a": {"weight": "x"}}', "weight of a must be a number"),
            ('{"a": {"guarantee": 1.5}}', "guarantee of a must be at most 1"),
            ('{"a": {"guarantee": 0.5, "limit": 0.4}}', "guarantee of a must be at most its limit"),
            ('{"a": {"limit": 0}}', "limit of a must be greater than 0"),
            ('{"a": {"guarantee": 0.6}, "b": {"guarantee": 0.5}}', "must add up to at most 1, got 1.1"),
            ('{"*": {"guarantee": 0.6}}', "can have no guarantee"),
            ('{"a": 3}', "a must be an object"),
            ('{"": {}}', "name must be a text"),
            ("{", "is not JSON"),
            ("[1]", "must be a JSON object"),
            ("/nowhere/tenants.json", "cannot be read"),
            (3, "must be a JSON object"),
        ],
    )
    def test_errors_name_tenant_field_and_limit(self, value: Any, message: str) -> None:
        with pytest.raises(ConfigError, match="(?i)" + message.replace("*", r"\*")):
            parse_tenants(value)
