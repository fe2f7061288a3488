"""The simulator decides as the engine does, step for step, and leaps change nothing."""

import math
from dataclasses import fields, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.tiny_llama import VOCAB, save_tiny_llama

from winnow import LLM
from winnow.config import EvictionConfig, SchedulerConfig
from winnow.engine.engine import Engine
from winnow.engine.memory.swap_costs import SwapCosts
from winnow.engine.requests.new_request import NewRequest
from winnow.eviction import PRESETS, find_preset
from winnow.sampling import SamplingParams
from winnow_lab.bench.traces import TraceRequest
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import HARDWARE
from winnow_lab.plan.models import MODELS, find_model
from winnow_lab.plan.simulated_engine import EngineSetup
from winnow_lab.plan.simulation import History, LeastLoaded, PrefixAware, RoundRobin, Sample, simulate
from winnow_lab.plan.simulation_report import chrome_trace, summary

Decision = tuple[tuple[str, int, int], ...]
ALIKE = ("random", "sinks-recent", "recent")
"""Baselines that leave as many KVs, as often, as knorm and tova do."""
EXACT = [name for name, each in PRESETS.items() if each.policy.budget.equal_rows and name not in ALIKE]
"""Policies whose rows keep alike: what a round leaves does not depend on the model."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", 0)


def prompts(lengths: list[int]) -> list[list[int]]:
    """Half of them begin alike, to meet in the prefix cache."""
    return [
        [(7 * place + (number if number % 2 else 0) * 13) % (VOCAB - 2) + 2 for place in range(length)]
        for number, length in enumerate(lengths)
    ]


def decisions(engine: Engine, arrivals: dict[int, list[NewRequest]]) -> tuple[list[Decision], dict[str, int]]:
    """What each step computes of which request, and how many KVs the cache held, with requests added by step."""
    seen: list[Decision] = []
    schedule = engine.scheduler.schedule

    def spy() -> Any:
        step = schedule()
        seen.append(
            tuple(
                (sequence.request.request_id, entry.start, entry.count)
                for sequence, entry in zip(step.sequences, step.plan.entries, strict=True)
            )
        )
        return step

    engine.scheduler.schedule = spy  # type: ignore[method-assign]
    # What was measured here and there would make other victims.
    engine.scheduler.memory.swap.costs = SwapCosts(1e-9, 1e-5)
    number = 0
    while arrivals or engine.has_unfinished:
        for new in arrivals.pop(number, ()):
            engine.add(new)
        engine.step()
        number += 1
    stats = engine.stats()
    return seen, {
        "peak": stats.kv_bytes_peak,
        "preemptions": stats.num_preemptions,
        "rounds": stats.num_rounds,
        "cached": stats.cached_tokens,
        "freed": stats.kv_bytes_freed,
        "swaps": stats.num_swaps,
        "out": stats.swap_bytes_out,
        "host": stats.host_bytes_peak,
    }


def both_decide(
    tiny: Path,
    name: str,
    scheduler: SchedulerConfig,
    host: int,
    tenants: tuple[str | None, ...] = (None,),
    memory: int = 700,
) -> dict[str, int]:
    """Serve the same arrivals with the engine and the simulator, which must decide alike. Returns the counters.

    Args:
        memory: KiB.
    """
    budget = find_preset(name).policy.budget
    takes = name != "full" and budget.fixed is None
    eviction = EvictionConfig(eviction=name, kv_budget=300 if takes else None)
    lengths, new_tokens = [700, 90, 333, 700, 64, 801, 12, 700, 450, 128], 40
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    tokens = prompts(lengths)

    def arrivals() -> dict[int, list[NewRequest]]:
        requests = [
            NewRequest(str(i), None, list(ids), params, tenant=tenants[i % len(tenants)])
            for i, ids in enumerate(tokens)
        ]
        return {0: requests[:5], 3: requests[5:7], 20: requests[7:]}

    options = {each.name: getattr(scheduler, each.name) for each in fields(scheduler)} | {
        "eviction": name,
        "kv_budget": eviction.kv_budget,
        "kv_memory": memory * 2**10,
        "kv_offloading_size": host or None,
        "threads": 1,
    }
    with LLM(tiny, dtype="float32", device="cpu", **options) as llm:
        real = llm.driver.engine
        assert isinstance(real, Engine)
        expected, expected_stats = decisions(real, arrivals())
    deployment = Deployment(
        find_model(tiny), HARDWARE["desktop-ddr5"], eviction=eviction, scheduler=scheduler
    )
    setup = EngineSetup.of(deployment, memory * 2**10, host_bytes=host, fold=False)
    found, stats = decisions(setup.open(deployment).engine, arrivals())
    assert found == expected
    assert stats == expected_stats
    return stats


@pytest.mark.parametrize(("name", "host"), zip(EXACT, cycle([0, 2**20])))
def test_the_simulator_decides_as_the_engine_does(tiny: Path, name: str, host: int) -> None:
    chunk = 512 if PRESETS[name].policy.score.window else 64
    both_decide(tiny, name, SchedulerConfig(6, 512, chunk), host)


ALL = ("rounds", "swaps", "cached")


@pytest.mark.parametrize(
    ("name", "order", "memory", "happens"),
    [
        ("streaming", "fair", 480, ALL),
        ("streaming", "priority", 560, ALL),
        ("batch-max", "fair", 480, ("rounds", "cached")),
        ("batch-max", "priority", 480, ("rounds", "cached")),
    ],
)
def test_it_does_with_rounds_swaps_prefix_hits_and_tenants_in_one_run(
    tiny: Path, name: str, order: str, memory: int, happens: tuple[str, ...]
) -> None:
    tenants = {"a": {"guarantee": 0.4, "weight": 2}, "b": {"limit": 0.8}}
    scheduler = SchedulerConfig(6, 512, 64, scheduling_policy=order, tenants=tenants)
    stats = both_decide(tiny, name, scheduler, 2**20, ("a", "b", "a", "b", "a", None), memory)
    assert min(stats[name] for name in happens) > 0, stats


def trace(lengths: list[tuple[int, int, float]]) -> list[TraceRequest]:
    time, requests = 0.0, []
    for prompt, new, gap in lengths:
        time += gap
        requests.append(TraceRequest(time, prompt, new, (1, 2, 3)[: prompt // 512]))
    return requests


POLICIES = ["full", "snapkv", "batch-max", "kv-compress-pd", "streaming", "leverage", "h2o"]


@settings(max_examples=12)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 150), st.floats(0, 2.0)), min_size=1, max_size=9
    ),
    name=st.sampled_from(POLICIES),
    memory=st.integers(400, 4000),
    caching=st.booleans(),
    fold=st.booleans(),
    host=st.sampled_from([0, 2**22]),
    order=st.sampled_from(["priority", "fair", "srtf"]),
    watermark=st.sampled_from([1.0, 0.8]),
    quotas=st.booleans(),
)
def test_leaps_change_nothing(
    lengths: list[tuple[int, int, float]],
    name: str,
    memory: int,
    caching: bool,
    fold: bool,
    host: int,
    order: str,
    watermark: float,
    quotas: bool,
) -> None:
    deployment = Deployment(
        replace(MODELS["llama-3-8b"], num_layers=2, num_kv_heads=2),
        HARDWARE["L4"],
        eviction=EvictionConfig(eviction=name, kv_budget=None if name == "full" else 576),
        scheduler=SchedulerConfig(
            4,
            768,
            512,
            scheduling_policy=order,
            watermark_high=watermark,
            tenants={"a": {"guarantee": 0.3}, "b": {"limit": 0.7}} if quotas else (),
        ),
    )
    setup = EngineSetup.of(
        deployment,
        memory * deployment.layout.block_bytes,
        4096,
        prefix_caching=caching,
        host_bytes=host,
        fold=fold,
    )
    requests = trace(lengths)
    leapt = simulate(deployment, setup, requests, tenants=("a", "b", None))
    walked = simulate(deployment, setup, requests, tenants=("a", "b", None), leaps=False)
    assert (leapt.steps, leapt.rounds, leapt.preemptions) == (walked.steps, walked.rounds, walked.preemptions)
    assert leapt.kv_bytes_peak == walked.kv_bytes_peak
    assert leapt.cached_tokens == walked.cached_tokens
    for one, other in zip(leapt.served, walked.served, strict=True):
        assert one.error == other.error
        assert one.latency == pytest.approx(other.latency)
        assert one.ttft == pytest.approx(other.ttft)


def fleet(router: Any, replicas: int = 2, *, shared: bool = True) -> Any:
    deployment = Deployment(MODELS["llama-3-8b"], HARDWARE["L4"])
    setup = EngineSetup.of(deployment)
    requests = [
        TraceRequest(0.05 * i, 2048, 64, tuple(100 * (i % 2 if shared else i) + block for block in range(4)))
        for i in range(24)
    ]
    return simulate(deployment, setup, requests, replicas, router)


def test_routers_share_the_work_and_prefixes_stay_together() -> None:
    spread = fleet(RoundRobin())
    assert [each.replica for each in spread.served] == [0, 1] * 12
    aware = fleet(PrefixAware(slack=100.0))
    for family in (0, 1):
        assert len({each.replica for each in aware.served[family::2]}) == 1
    assert {each.replica for each in fleet(LeastLoaded()).served} == {0, 1}
    assert aware.cached_tokens > 0


def test_more_replicas_serve_sooner() -> None:
    one, two = (summary(fleet(LeastLoaded(), count, shared=False)) for count in (1, 2))
    assert two["latency"]["p90"] < one["latency"]["p90"]


def test_the_report_counts_tokens_and_good_requests() -> None:
    simulation = fleet(RoundRobin())
    values = summary(simulation, max_ttft=math.inf, max_tpot=math.inf)
    assert values["output_tokens"] == 24 * 64
    assert values["good_requests"] == 1.0
    assert summary(simulation, max_ttft=0.0)["good_requests"] == 0.0
    events = chrome_trace(simulation)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 3 * 24
    assert all(event["dur"] >= 0 for event in spans)


def test_a_request_that_cannot_fit_is_refused_alone() -> None:
    deployment = Deployment(MODELS["llama-3-8b"], HARDWARE["L4"])
    setup = EngineSetup.of(deployment, max_model_len=1000)
    simulation = simulate(deployment, setup, [TraceRequest(0, 5000, 5), TraceRequest(0, 50, 5)])
    assert [each.error is None for each in simulation.served] == [False, True]


def test_a_history_thins_out_evenly() -> None:
    history = History()
    for moment in range(20_000):
        history.note(lambda moment=moment: Sample(moment, 0, 0, 0, 0))  # type: ignore[misc]
    times = [sample.time for sample in history.samples]
    assert 2000 <= len(times) <= 4096
    assert times == sorted(times)
