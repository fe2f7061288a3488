"""Budgets over ranks: costs of each rank's own heads, put together, allot what one rank with all heads allots."""

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lockstep import ask, build, open_llm, small
from torch import Tensor
from torch.nn import functional

from winnow import LLM
from winnow.eviction import PRESETS, AdaptiveHeads, AdaptiveRows, Budget, EqualHeads, Fixed, Pyramid
from winnow.eviction.costs import Ranking, RowCosts
from winnow.eviction.round_rows import RoundInputs

BLOCK = 4
FLOORS = [
    {},
    {"row_floor": 0.4},
    {"row_floor": 3, "layer_floor": 0.7},
    {"layer_floor": 0.9},
    {"row_floor": 0.2},
]
BUDGETS: list[Budget] = [
    make(**floors)
    for floors in FLOORS
    for make in (
        EqualHeads,
        lambda **each: EqualHeads(Pyramid(5), **each),
        lambda **each: Fixed(kvs=2, **each),
        AdaptiveHeads,
        lambda **each: AdaptiveHeads(0.0, Pyramid(2), **each),
        AdaptiveRows,
    )
]


def heads_of(ranking: Ranking, heads: slice) -> Ranking:
    """The ranking of a rank that holds some of the heads; its rows are padded to its own longest one."""
    rows = ranking.rows
    length = rows.length[:, :, heads]
    room = -(-int(length.max()) // BLOCK) * BLOCK
    local = SimpleNamespace(
        round=rows.round,
        cache=rows.cache,
        block=None,
        length=length,
        position=rows.position[:, :, heads, :room],
        missing=0,
    )
    return Ranking(
        local,  # type: ignore[arg-type]
        ranking.score[:, :, heads, :room],
        ranking.must_stay[:, :, heads, :room],
    )


def joined(parts: list[RowCosts]) -> RowCosts:
    """The costs of ranks of unequal rows put together; +inf pads to the longest."""
    costs = [part.cost for part in parts if part.cost is not None]
    width = max((cost.shape[-1] for cost in costs), default=0)
    padded = [functional.pad(cost, (0, width - cost.shape[-1]), value=torch.inf) for cost in costs]
    return replace(
        parts[0],
        length=torch.cat([part.length for part in parts], dim=2),
        protected=torch.cat([part.protected for part in parts], dim=2),
        cost=torch.cat(padded, dim=2) if padded else None,
        missing=sum(part.missing for part in parts),
    )


def over_ranks(budget: Budget, ranking: Ranking, first: int) -> Tensor:
    """Targets where one rank holds the first `first` heads, and another the others."""
    parts = [heads_of(ranking, slice(first)), heads_of(ranking, slice(first, None))]
    return budget.allot(joined([budget.costs(part) for part in parts]))


def random_ranking(budget: Budget, rng: random.Random) -> Ranking:
    """Rows of uneven length, with many equal scores."""
    sequences, layers, heads = rng.randint(1, 3), rng.randint(1, 4), rng.randint(2, 5)
    shape = (layers, sequences, heads)
    seed = torch.Generator().manual_seed(rng.randrange(2**31))
    length = torch.randint(1, 30, shape, generator=seed)
    room = -(-int(length.max()) // BLOCK) * BLOCK
    valid = torch.arange(room) < length[..., None]
    position = torch.stack([torch.randperm(room, generator=seed) for _ in range(length.numel())]).int()
    tokens = torch.randint(30, 60, (sequences,), generator=seed)
    round_ = RoundInputs(
        slots=tuple(range(sequences)),
        now=tokens.int() - 1,
        budget=torch.randint(4, 20, (sequences,), generator=seed),
        sinks=0,
        recent=torch.randint(0, 3, (sequences,), generator=seed),
        spans=((),) * sequences,
        tokens=tokens,
    )
    rows = SimpleNamespace(
        round=round_,
        cache=SimpleNamespace(pool=SimpleNamespace(layout=SimpleNamespace(block_size=BLOCK))),
        block=None,
        length=length.int(),
        position=position.view(*shape, room),
        missing=0,
    )
    return Ranking(
        rows,  # type: ignore[arg-type]
        torch.randint(0, 9, (*shape, room), generator=seed).float(),
        valid & (torch.rand(*shape, room, generator=seed) < 0.1),
    )


@pytest.mark.parametrize("budget", BUDGETS, ids=repr)
def test_two_ranks_allot_what_one_does(budget: Budget) -> None:
    rng = random.Random(repr(budget))
    for _ in range(20):
        ranking = random_ranking(budget, rng)
        expected = budget.allot(budget.costs(ranking))
        heads = expected.shape[2]
        assert torch.equal(over_ranks(budget, ranking, rng.randint(1, heads - 1)), expected)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("model")
    build(path, 0)
    with open_llm(path, 0, prefill_chunk=None) as llm:
        yield llm


# One of each budget in rounds of each kind: the scores are one tensor to them.
ALLOTTING = {
    (preset.policy.budget, preset.policy.when.in_prefill, preset.policy.when.in_decode): name
    for name, preset in PRESETS.items()
    if not preset.policy.when.never and preset.policy.compact is None
}


@pytest.mark.parametrize("name", ALLOTTING.values())
def test_two_ranks_allot_what_a_preset_allots(name: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds of a running engine, each planned by one rank and by two."""
    rounds = 0
    rng = random.Random(name)
    policy = small(PRESETS[name].policy, rng)
    costs = type(policy.budget).costs

    def checked(budget: Budget, ranking: Ranking) -> RowCosts:
        nonlocal rounds
        rounds += 1
        ranks = [costs(budget, heads_of(ranking, heads)) for heads in (slice(1), slice(1, None))]
        alone = costs(budget, ranking)
        assert torch.equal(budget.allot(joined(ranks)), budget.allot(alone))
        return alone

    monkeypatch.setattr(type(policy.budget), "costs", checked)
    for asked in (ask(policy, rng, 12) for _ in range(2)):
        llm.submit(asked.prompt, asked.params)
    while llm.has_unfinished:
        llm.step()
    assert rounds
