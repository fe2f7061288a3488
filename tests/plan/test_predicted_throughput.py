"""Predicted throughput beside the engine's own loop on a virtual clock, and what a prompt's work counts."""

from dataclasses import replace

import pytest

from winnow.bench.traces import TraceRequest
from winnow.config import EvictionConfig, SchedulerConfig
from winnow.plan.deployment import Deployment
from winnow.plan.hardware import HARDWARE, Hardware
from winnow.plan.models import MODELS
from winnow.plan.occupancy import Request
from winnow.plan.simulated_engine import EngineSetup
from winnow.plan.simulation import simulate
from winnow.plan.step_time import CPU_FACTORS, Factors, StepWork
from winnow.plan.throughput import predict_throughput

CPU = Hardware("cpu", 16 * 2**30, 60e9, 950e9, 30e9, "cpu", True)
SMALL = Deployment(MODELS["smollm2-135m"], CPU, dtype="bfloat16")
LARGE = Deployment(MODELS["llama-3-8b"], HARDWARE["L4"])
KVZIP = EvictionConfig(eviction="kvzip", compression=4.0)


def policy(name: str) -> EvictionConfig:
    return EvictionConfig() if name == "full" else EvictionConfig(eviction=name, compression=4.0)


@pytest.mark.parametrize(("deployment", "memory"), [(SMALL, 2**29), (LARGE, 6 * 2**29)], ids=["CPU", "GPU"])
@pytest.mark.parametrize(
    ("name", "prompt", "new", "requests", "tolerance"),
    [
        ("full", 2000, 64, 40, 0.05),
        ("full", 3000, 16, 12, 0.05),
        ("kvzip", 2000, 64, 40, 0.05),
        ("snapkv", 2000, 64, 40, 0.05),
        ("snapkv", 3000, 16, 12, 0.05),
        ("kv-compress-pd", 2000, 64, 40, 0.05),
        ("batch-max", 3000, 16, 12, 0.16),
        ("snapkv", 500, 256, 40, 0.3),
    ],
)
def test_a_prediction_is_near_the_simulation(
    deployment: Deployment, memory: int, name: str, prompt: int, new: int, requests: int, tolerance: float
) -> None:
    planned = replace(deployment, eviction=policy(name))
    predicted = predict_throughput(deployment, Request(prompt, new), requests, memory, policy(name))
    setup = EngineSetup.of(planned, memory, prefix_caching=False)
    simulated = simulate(planned, setup, [TraceRequest(0.0, prompt, new)] * requests)
    assert predicted is not None
    assert predicted.seconds == pytest.approx(simulated.seconds, rel=tolerance)
    assert predicted.output_rate == pytest.approx(requests * new / predicted.seconds)
    if tolerance < 0.3:  # nothing was preempted and computed again
        assert predicted.work.tokens == simulated.work.tokens
        assert predicted.work.attended == pytest.approx(simulated.work.attended, rel=0.02)


def test_compression_gains_where_memory_holds_few() -> None:
    """SnapKV's batch is several times the full cache's in the same bytes; where all fit anyway it gains little."""
    request = Request(4000, 256)
    tight = [predict_throughput(LARGE, request, 200, 2**32, each) for each in (None, policy("snapkv"))]
    ample = [predict_throughput(LARGE, request, 4, 2**34, each) for each in (None, policy("snapkv"))]
    assert tight[0] is not None and tight[1] is not None and ample[0] is not None and ample[1] is not None
    assert tight[1].batch > 2.5 * tight[0].batch
    assert tight[1].output_rate > 1.5 * tight[0].output_rate
    assert ample[0].batch == ample[1].batch == 4
    assert ample[1].output_rate < 1.2 * ample[0].output_rate


def test_memory_that_holds_no_request_has_no_throughput() -> None:
    assert predict_throughput(LARGE, Request(4000, 10), 4, 2**20) is None


def test_max_num_seqs_bounds_the_batch() -> None:
    planned = replace(SMALL, scheduler=SchedulerConfig(max_num_seqs=3))
    found = predict_throughput(planned, Request(100, 10), 9)
    assert found is not None and found.batch == 3


def test_a_replay_is_part_of_the_prompt() -> None:
    """2,000 tokens are repeated in a pass that sees all of them before itself: 2,000 x (2,000 + 1,000) pairs more."""
    request = Request(2000, 64)
    full, replayed = (each.prompt_work(request) for each in (SMALL, replace(SMALL, eviction=KVZIP)))
    assert full == StepWork(
        steps=4,
        tokens=2000,
        sequences=4,
        kv_tokens=512 + 1024 + 1536 + 2000,
        attended=2000 * 1000,
        samples=1,
        prompt_tokens=2000,
    )
    assert replayed.tokens == 2 * full.tokens
    assert replayed.attended == full.attended + 2000 * 3000
    assert (replayed.rounds, replayed.round_kvs) == (1, 2000)
    seconds = SMALL.times.seconds(replayed) / SMALL.times.seconds(full)
    assert 2.2 < seconds < 2.8  # measured: about 1.6 prompts more


def test_a_cpu_has_factors_of_its_own() -> None:
    assert SMALL.times.factors == CPU_FACTORS and LARGE.times.factors == Factors()
    assert replace(SMALL, factors=Factors()).times.factors == Factors()
