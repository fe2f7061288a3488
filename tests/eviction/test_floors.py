"""Sequences under floors hold no more blocks than admission was promised."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from lockstep import ALWAYS, ONCE, WITHIN, WORDS, build, open_llm

from winnow import SamplingParams
from winnow.eviction import (
    AdaptiveHeads,
    AdaptiveRows,
    Budget,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    Keep,
    KeyDifference,
    Pyramid,
    When,
)

KINDS: list[Callable[..., Budget]] = [
    AdaptiveRows,
    AdaptiveHeads,
    EqualHeads,
    lambda **floors: EqualHeads(Pyramid(5), **floors),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build(path, 0, num_layers=4)
    return path


@pytest.mark.parametrize("seed", range(8))
def test_no_more_blocks_than_promised(seed: int, model: Path) -> None:
    rng = random.Random(seed)
    budget = KINDS[seed % len(KINDS)](
        row_floor=rng.choice([0, 0.3, 0.7, 1.0, 3, 20]), layer_floor=rng.choice([0, 0.5, 1.0])
    )
    when = rng.choice([ONCE, ALWAYS, WITHIN, When(after_prefill=True, decode_every=5)])
    keep = Keep(sinks=rng.choice([0, 2]), recent=rng.choice([0, 3]))
    policy = EvictionPolicy(rng.choice([KeyDifference(), Cumulative()]), budget, keep, when)
    prompt = [rng.randrange(len(WORDS)) for _ in range(rng.randint(40, 100))]
    with open_llm(model, seed) as llm:
        params = SamplingParams(
            max_tokens=30, ignore_eos=True, eviction=policy, kv_budget=rng.randint(16, 30)
        )
        llm.submit(prompt, params)
        [sequence] = list(llm._engine.scheduler.waiting)[-1].request.sequences
        cache = llm._engine.scheduler.ledger
        assert sequence.eviction is not None
        promised = sequence.eviction.peak_blocks(cache.layout, len(prompt) + 30)
        while llm.has_unfinished:
            llm.step()
            if sequence.kv.slot is not None:
                lengths = cache.lengths[sequence.kv.slot]
                assert (-(-lengths // cache.layout.block_size)).sum() <= promised, budget
        llm.check_integrity()
