"""Every policy, run by the engine, keeps what the dense oracle keeps, token for token, and says what it says.

WINNOW_SEEDS: how many models, prompts and budgets each case is tried with.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from dense_model import Llama
from dense_oracle import DenseSequence
from lockstep import ALWAYS, ANSWERS, BLOCK, WITHIN, WORDS, Models, ask, compare, small, tight

from winnow.attention import Group, Smoothing
from winnow.eviction import (
    PRESETS,
    AdaptiveHeads,
    AdaptiveRows,
    Average,
    BelowAverage,
    ByValueNorm,
    Cumulative,
    EqualHeads,
    EvictionPolicy,
    EvictionTarget,
    Fixed,
    Keep,
    KeyDifference,
    LastQuery,
    Leverage,
    Pyramid,
    Recency,
    When,
    Window,
)
from winnow.executor.torch_executor import TorchExecutor

SEEDS = range(int(os.environ.get("WINNOW_SEEDS", "1")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp)
    yield models
    models.close()


# What else a policy may do, fit what it keeps, has an oracle of its own: test_fit.py.
# One name of each policy.
SELECTING = list(
    {preset.policy: name for name, preset in PRESETS.items() if preset.policy.compact is None}.values()
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SELECTING)
def test_preset(name: str, seed: int, models: Models) -> None:
    rng = random.Random(f"{name} {seed}")
    policy = small(PRESETS[name].policy, rng)
    asked = [ask(policy, rng, answer) for answer in ANSWERS]
    asked[1] = replace(asked[1], context_len=len(asked[1].prompt) - rng.randint(1, 12))
    compare(models, seed, asked)


def before_template(policy: EvictionPolicy) -> EvictionPolicy:
    """The same with windows that end with the question."""
    score = policy.score
    if isinstance(score, Window):
        score = replace(score, skip_template=True)
    return replace(policy, score=score)


def templated() -> list[str]:
    """Presets for each kind of score, and each kind of budget with rounds within the prompt and without."""
    names, seen = [], set()
    for name in SELECTING:
        policy = PRESETS[name].policy
        kinds = {type(policy.score), (type(policy.budget), policy.when.in_prefill)}
        able = before_template(policy).score.before_template
        if able and not (policy.when.never or isinstance(policy.budget, Fixed) or kinds <= seen):
            names.append(name)
            seen |= kinds
    return names


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", templated())
def test_a_template_follows_the_question(name: str, seed: int, models: Models) -> None:
    """Windows and recent KVs end with the question, and what follows it stays."""
    rng = random.Random(f"template {name} {seed}")
    policy = before_template(small(PRESETS[name].policy, rng))
    asked = []
    for answer, tail in zip(ANSWERS, (rng.randint(1, 7), rng.randint(9, 12)), strict=True):
        each = ask(policy, rng, answer)
        asked.append(replace(each, budget=each.budgets[0] + tail, template_tail=tail))
    compare(models, seed, asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_preempted_behind_a_template(seed: int, models: Models) -> None:
    rng = random.Random(f"preempted template {seed}")
    names = ["ada-pyramidkv", "scissorhands", "kv-compress-pd", "h2o"]
    policies = [before_template(small(PRESETS[name].policy, rng)) for name in names]
    asked = [
        replace(ask(replace(p, when=p.when.alone), rng, 41), budget=30, template_tail=5) for p in policies
    ]
    stats = compare(models, seed, asked, max_num_seqs=5, kv_memory=tight(models, seed, 150))
    assert stats.num_preemptions > 0


COMPOSED = {
    "window, group max, pooled per query head": EvictionPolicy(
        Window(8, 1, Smoothing(7, per_query_head=True), Group.MAX, continual=True),
        EqualHeads(),
        Keep(recent=8),
        ALWAYS,
    ),
    "window, mean pooled, pyramid": EvictionPolicy(
        Window(4, 1, Smoothing(5, "average", skip_window=True), Group.MEAN),
        EqualHeads(Pyramid(3)),
        Keep(sinks=1, recent=4),
        When(after_prefill=True, prefill_every=16),
    ),
    "window without a round after the prompt": EvictionPolicy(
        Window(4, 2, Smoothing(3), continual=True),
        AdaptiveRows(),
        Keep(recent=4),
        When(prefill_every=8, decode_every=8),
    ),
    "cumulative, group max, heads compete": EvictionPolicy(
        Cumulative(2, group=Group.MAX), AdaptiveHeads(floor=0.5), Keep(sinks=1, recent=3), ALWAYS
    ),
    "average without first queries": EvictionPolicy(
        Average(exclude_first=3), EqualHeads(), Keep(recent=4), WITHIN
    ),
    "average, rows compete within": EvictionPolicy(
        Average(group=Group.MAX), AdaptiveRows(), Keep(sinks=2), WITHIN
    ),
    "rows compete by key difference, nothing kept": EvictionPolicy(
        KeyDifference(), AdaptiveRows(), Keep(), ALWAYS
    ),
    "rows compete by leverage, nothing kept": EvictionPolicy(Leverage(0.3), AdaptiveRows(), Keep(), ALWAYS),
    "leverage of neighbours, heads compete": EvictionPolicy(
        Leverage(1.0, Smoothing(3)), AdaptiveHeads(), Keep(sinks=1), ALWAYS
    ),
    "below average, forgotten in the prompt": EvictionPolicy(
        BelowAverage(6), EqualHeads(Pyramid(2)), Keep(recent=2), ALWAYS
    ),
    "rows compete by age: equals everywhere": EvictionPolicy(
        Recency(), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "heads compete by counts: many equals": EvictionPolicy(
        BelowAverage(5), AdaptiveHeads(), Keep(sinks=1), ALWAYS
    ),
    "rows compete by counts: many equals": EvictionPolicy(
        BelowAverage(5), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "rows compete, the newest are worth nothing": EvictionPolicy(
        Cumulative(exclude_first=9), AdaptiveRows(), Keep(sinks=1), ALWAYS
    ),
    "fixed": EvictionPolicy(Cumulative(), Fixed(kvs=7), Keep(recent=0.3), ALWAYS),
    "leverage of unrotated keys": EvictionPolicy(
        Leverage(0.3, Smoothing(3, "average"), unrotated=True), AdaptiveHeads(), Keep(), ALWAYS
    ),
    "average by value norm": EvictionPolicy(
        ByValueNorm(Average(exclude_first=2)), EqualHeads(), Keep(recent=3), WITHIN
    ),
    "last query by value norm over all heads": EvictionPolicy(
        ByValueNorm(LastQuery()), EqualHeads(), Keep(sinks=1), ALWAYS
    ),
    "rows compete above floors": EvictionPolicy(
        KeyDifference(), AdaptiveRows(row_floor=0.5, layer_floor=0.75), Keep(sinks=1), ALWAYS
    ),
    "rows compete above a count": EvictionPolicy(
        Cumulative(2), AdaptiveRows(row_floor=6), Keep(sinks=1, recent=3), ALWAYS
    ),
    "rows compete above floors of layers, within": EvictionPolicy(
        Average(), AdaptiveRows(layer_floor=0.5), Keep(sinks=2), WITHIN
    ),
    "heads compete above floors over a pyramid": EvictionPolicy(
        Cumulative(), AdaptiveHeads(0.0, Pyramid(20), row_floor=0.4), Keep(recent=3), ALWAYS
    ),
    "heads compete above floors of layers": EvictionPolicy(
        Leverage(0.3), AdaptiveHeads(0.2, layer_floor=0.3), Keep(sinks=1), ALWAYS
    ),
    "a pyramid with a floor": EvictionPolicy(
        Cumulative(), EqualHeads(Pyramid(20), layer_floor=0.5), Keep(recent=3), ALWAYS
    ),
    "every few steps": EvictionPolicy(
        Cumulative(), EqualHeads(), Keep(recent=4), When(after_prefill=True, every_steps=7)
    ),
    "when all have gathered": EvictionPolicy(
        Window(4, 2, continual=True),
        AdaptiveRows(),
        Keep(recent=4),
        When(after_prefill=True, uncompressed_tokens=25),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMPOSED)
def test_composition(name: str, seed: int, models: Models) -> None:
    """The second request has a question after its context, and two spans to protect."""
    rng = random.Random(f"{name} {seed}")
    asked = [ask(COMPOSED[name], rng, answer) for answer in ANSWERS]
    prompt = asked[1].prompt
    context, budget = len(prompt) - rng.randint(1, 12), asked[1].budgets[0] + 8
    asked[1] = replace(asked[1], context_len=context, budget=budget)
    if not isinstance(COMPOSED[name].budget, Fixed):  # there the protected set is the budget
        asked[1] = replace(asked[1], spans=((3, 5), (rng.randint(6, 10), 12)))
    compare(models, seed, asked)


@pytest.mark.parametrize("seed", SEEDS)
def test_policies_share_a_batch_and_rounds_rank_few_at_a_time(seed: int, models: Models) -> None:
    rng = random.Random(f"few {seed}")
    names = ["h2o", "kv-compress-pd", "streaming", "full"]
    asked = [ask(small(PRESETS[name].policy, rng), rng, 21) for name in names]
    compare(models, seed, asked, max_num_seqs=6, max_round_kvs=300)


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_under_pressure(seed: int, models: Models) -> None:
    rng = random.Random(f"pressure {seed}")
    names = ["kv-compress", "ada-snapkv", "kv-compress-full"]
    asked = [ask(small(PRESETS[name].policy, rng), rng, 61) for name in names]
    stats = compare(models, seed, asked, max_num_seqs=4, kv_memory=tight(models, seed, 220))
    assert stats.num_preemptions == 0, "their rounds are not repeated"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["kv-compress", "kv-compress-full"])
def test_the_round_after_a_prompt_takes_in_all(
    name: str, seed: int, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    members: list[int] = []
    plan_evictions = TorchExecutor.plan_evictions

    def counted(executor: TorchExecutor, taking_part: list[EvictionTarget]) -> list[int]:
        members.append(len(taking_part))
        return plan_evictions(executor, taking_part)

    monkeypatch.setattr(TorchExecutor, "plan_evictions", counted)
    rng = random.Random(f"join {seed}")
    policy = small(PRESETS[name].policy, rng)
    asked = [ask(policy, rng, 33) for _ in range(3)]
    compare(models, seed, asked, max_num_seqs=2)  # the third begins when one of the others has ended
    assert max(members) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_preempted(seed: int, models: Models) -> None:
    """What is computed again after a preemption is shrunk at the same places."""
    rng = random.Random(f"preempted {seed}")
    names = ["snapkv", "kv-compress-full", "streaming", "full"]
    policies = [small(PRESETS[name].policy, rng) for name in names]
    asked = [ask(replace(p, when=p.when.alone), rng, 41) for p in policies]
    stats = compare(models, seed, asked, max_num_seqs=5, kv_memory=tight(models, seed, 150))
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budgets", [(14, 24, 19), (17, 17)], ids=["budgets apart", "budgets alike"])
def test_samples_of_one_prompt(budgets: tuple[int, ...], seed: int, models: Models) -> None:
    rng = random.Random(f"samples {seed}")
    policies = [small(PRESETS[name].policy, rng) for name in ("kv-compress-full", "scissorhands", "snapkv")]
    asked = [replace(ask(policy, rng, 21), budget=budgets) for policy in policies]
    asked[0] = replace(asked[0], context_len=len(asked[0].prompt) - rng.randint(1, 12))
    compare(models, seed, asked, max_num_seqs=9)


def test_the_oracle_computes_what_transformers_computes(models: Models) -> None:
    _, model = models(0)
    prompt = random.Random(0).choices(range(len(WORDS)), k=40)
    oracle = DenseSequence(Llama(model), EvictionPolicy(), 1, len(prompt), len(prompt), block_size=BLOCK)
    oracle.advance(prompt, len(prompt))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    found = torch.tensor([x.tolist() for x in oracle.logprobs], dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
