"""What a prompt's work counts."""

from dataclasses import replace

from winnow.config import EvictionConfig
from winnow_lab.plan.deployment import Deployment
from winnow_lab.plan.hardware import HARDWARE, Hardware
from winnow_lab.plan.models import MODELS
from winnow_lab.plan.occupancy import Request
from winnow_lab.plan.step_time import CPU_FACTORS, Factors, StepWork

CPU = Hardware("cpu", 16 * 2**30, 60e9, 950e9, 30e9, "cpu", True)
SMALL = Deployment(MODELS["smollm2-135m"], CPU, dtype="bfloat16")
LARGE = Deployment(MODELS["llama-3-8b"], HARDWARE["L4"])
KVZIP = EvictionConfig(eviction="kvzip", compression=4.0)


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
