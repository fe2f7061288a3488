"""The planner against brute force: every way to take blocks from a few small rows, and the cheapest of them."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from winnow.attention.ranked_rows import moves, score_of, sort_key
from winnow.eviction.budgets import above_floor, block_costs, cheapest_blocks, length_without
from winnow.eviction.costs import Ranking, ranks

# A row: its KVs as (score, protected). Few different scores, so that ties are common.
Row = list[tuple[float, bool]]
ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.0]), st.booleans()), max_size=11)


@st.composite
def sequences(draw: st.DrawFn) -> list[list[Row]]:
    """1 to 8 sequences with the same number of rows; the first rows count most, to keep brute force small."""
    num_rows = draw(st.integers(1, 3))
    shape = st.lists(ROWS, min_size=num_rows, max_size=num_rows)
    return draw(st.lists(shape, min_size=1, max_size=8))


def tensors(batch: list[list[Row]]) -> tuple[Tensor, Tensor]:
    """Sorted score [B, 1, rows, N], +inf for what cannot go, and lengths [B, 1, rows]."""
    longest = max((len(row) for rows in batch for row in rows), default=0) or 1
    score = torch.full((len(batch), 1, len(batch[0]), longest), torch.inf)
    for b, rows in enumerate(batch):
        for r, row in enumerate(rows):
            values = sorted(math.inf if protected else value for value, protected in row)
            score[b, 0, r, : len(row)] = torch.tensor(values)
    length = torch.tensor([[[len(row) for row in rows]] for rows in batch])
    return score, length


def costs(row: Row, block_size: int) -> list[float]:
    """What the row's first, second, ... freed block costs, as long as nothing protected must go."""
    free = sorted(value for value, protected in row if not protected)
    found = []
    gone = (len(row) % block_size or block_size) if row else math.inf
    while gone <= len(free):
        found.append(free[int(gone) - 1])
        gone += block_size
    return found


def cheapest(rows: list[Row], excess: int, block_size: int) -> tuple[int, float]:
    """By trying all combinations: how many blocks can go, at most `excess`, and the least that so many cost."""
    ladders = [costs(row, block_size) for row in rows]
    best: dict[int, float] = {}
    for taken in itertools.product(*(range(len(ladder) + 1) for ladder in ladders)):
        cost = sum(sum(ladder[:n]) for ladder, n in zip(ladders, taken, strict=True))
        best[sum(taken)] = min(best.get(sum(taken), math.inf), cost)
    most = min(excess, max(best))
    return most, best[most]


@settings(max_examples=60)
@given(batch=sequences(), block_size=st.integers(1, 4), data=st.data())
def test_frees_what_is_asked_at_the_least_cost(
    batch: list[list[Row]], block_size: int, data: st.DataObject
) -> None:
    excess = [data.draw(st.integers(0, 12)) for _ in batch]
    score, length = tensors(batch)
    freed = cheapest_blocks(block_costs(score, length, block_size), torch.tensor(excess))
    kept = length_without(length, freed, block_size)
    for b, rows in enumerate(batch):
        count, cost = cheapest(rows, excess[b], block_size)
        taken = freed[b, 0].tolist()
        assert sum(taken) == count, "every sequence gives up what it was asked, or all that it can"
        paid = sum(sum(costs(row, block_size)[:n]) for row, n in zip(rows, taken, strict=True))
        assert paid == pytest.approx(cost)
        for row, n, left in zip(rows, taken, kept[b, 0].tolist(), strict=True):
            assert -(-len(row) // block_size) - -(-left // block_size) == n, "what goes frees whole blocks"
            assert left == len(row) if n == 0 else left % block_size == 0, "and no more goes than that"
            assert left >= sum(protected for _, protected in row)


def cheapest_of_layers(
    layers: list[list[Row]], least: list[list[int]], most: list[int], excess: int, block_size: int
) -> tuple[int, float]:
    """`cheapest` with a minimum of KVs per row and a maximum of blocks that a layer gives up."""
    ladders, layer_of = [], []
    for layer, (rows, floors) in enumerate(zip(layers, least, strict=True)):
        for row, floor in zip(rows, floors, strict=True):
            allowed = [n for n in range(1, len(costs(row, block_size)) + 1)]
            allowed = [n for n in allowed if kept_after(len(row), n, block_size) >= min(floor, len(row))]
            ladders.append(costs(row, block_size)[: len(allowed)])
            layer_of.append(layer)
    best: dict[int, float] = {0: 0.0}
    for taken in itertools.product(*(range(len(ladder) + 1) for ladder in ladders)):
        gone = [0] * len(layers)
        for n, layer in zip(taken, layer_of, strict=True):
            gone[layer] += n
        if all(n <= limit for n, limit in zip(gone, most, strict=True)):
            cost = sum(sum(ladder[:n]) for ladder, n in zip(ladders, taken, strict=True))
            best[sum(taken)] = min(best.get(sum(taken), math.inf), cost)
    count = min(excess, max(best))
    return count, best[count]


def kept_after(length: int, blocks: int, block_size: int) -> int:
    return length if blocks == 0 else (-(-length // block_size) - blocks) * block_size


@settings(max_examples=60)
@given(
    layers=st.integers(1, 2).flatmap(
        lambda heads: st.lists(st.lists(ROWS, min_size=heads, max_size=heads), min_size=1, max_size=2)
    ),
    block_size=st.integers(1, 4),
    excess=st.integers(0, 14),
    data=st.data(),
)
def test_frees_what_is_asked_at_the_least_cost_above_floors(
    layers: list[list[Row]], block_size: int, excess: int, data: st.DataObject
) -> None:
    least = [[data.draw(st.integers(0, 12)) for _ in rows] for rows in layers]
    most = [data.draw(st.integers(0, 8)) for _ in layers]
    flat, length = tensors([[row for rows in layers for row in rows]])
    shape = (1, len(layers), len(layers[0]))
    score, length = flat.view(*shape, -1), length.view(shape)
    cost = block_costs(score, length, block_size)
    guarded = above_floor(cost, length, torch.minimum(torch.tensor([least]), length), block_size)
    freed = cheapest_blocks(guarded, torch.tensor([excess]), torch.tensor([most]))
    count, least_cost = cheapest_of_layers(layers, least, most, excess, block_size)
    taken = freed[0].tolist()
    assert sum(map(sum, taken)) == count, "it gives up what it was asked, or all that floors let go"
    paid = sum(
        sum(costs(row, block_size)[:n])
        for rows, ns in zip(layers, taken, strict=True)
        for row, n in zip(rows, ns, strict=True)
    )
    assert paid == pytest.approx(least_cost)
    for rows, ns, floors, limit in zip(layers, taken, least, most, strict=True):
        assert sum(ns) <= limit
        for row, n, floor in zip(rows, ns, floors, strict=True):
            assert kept_after(len(row), n, block_size) >= min(floor, len(row))


def test_four_sequences_of_one_round_each_give_up_sixteen_blocks() -> None:
    # The published code frees 16, 8, 0, 0 here: it counts from the batch's first block instead of the sequence's.
    score = torch.rand(4, 2, 2, 128).sort(dim=-1).values
    length = torch.full((4, 2, 2), 128)
    freed = cheapest_blocks(block_costs(score, length, 4), torch.tensor([16, 16, 16, 16]))
    assert freed.sum(dim=(1, 2)).tolist() == [16, 16, 16, 16]


@settings(max_examples=60)
@given(
    values=st.lists(
        st.tuples(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.integers(0, 2**31 - 2),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
        unique_by=lambda kv: kv[1],
    ),
    padding=st.integers(0, 5),
)
def test_rows_sort_by_score_then_age(values: list[tuple[float, int, bool]], padding: int) -> None:
    n = len(values)
    valid = torch.arange(n + padding) < n
    score = torch.tensor([v for v, _, _ in values] + [math.nan] * padding)
    position = torch.tensor([p for _, p, _ in values] + [7] * padding, dtype=torch.int32)
    protected = torch.tensor([k for _, _, k in values] + [False] * padding)
    key, order = sort_key(score, position, protected, valid).sort(dim=-1)
    found = score_of(key)
    expected = sorted(range(n), key=lambda i: (math.inf if values[i][2] else values[i][0], values[i][1]))
    assert order[:n].tolist() == expected
    assert found[:n].tolist() == [math.inf if values[i][2] else values[i][0] for i in order[:n].tolist()]
    assert (found[n:] == math.inf).all()


@settings(max_examples=60)
@given(rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=15), min_size=1, max_size=5))
def test_moves_fill_the_holes_and_nothing_else(rows: list[list[bool]]) -> None:
    longest = max(map(len, rows))
    stays = torch.tensor([row + [False] * (longest - len(row)) for row in rows])
    slot = torch.randperm(stays.numel()).view(stays.shape)
    kept = stays.sum(dim=-1)
    source, target = moves(stays, kept, slot)
    assert not set(source.tolist()) & set(target.tolist())
    content = torch.arange(stays.numel())  # what lies in each slot of the pool
    before = content[slot].clone()
    content[target] = content[source].clone()
    for r, row in enumerate(rows):
        front = content[slot[r, : int(kept[r])]].tolist()
        assert sorted(front) == sorted(before[r, i].item() for i, stay in enumerate(row) if stay)
        assert sum(s in source.tolist() for s in slot[r].tolist()) == sum(row[int(kept[r]) :]), (
            "and no move is idle"
        )


@settings(max_examples=60)
@given(rows=st.lists(ROWS, min_size=1, max_size=5), data=st.data())
def test_the_lowest_are_the_first_of_the_order(rows: list[Row], data: st.DataObject) -> None:
    longest = max(map(len, rows)) + data.draw(st.integers(0, 3)) or 1
    score, position = (
        torch.full((1, 1, len(rows), longest), -1.0),
        torch.randint(50, (1, 1, len(rows), longest)),
    )
    protected = torch.zeros(1, 1, len(rows), longest, dtype=torch.bool)
    for r, row in enumerate(rows):
        score[0, 0, r, : len(row)] = torch.tensor([value for value, _ in row])
        protected[0, 0, r, : len(row)] = torch.tensor([keep for _, keep in row])
        position[0, 0, r, : len(row)] = torch.randperm(len(row))
    length = torch.tensor([[[len(row) for row in rows]]])
    count = torch.tensor([[[data.draw(st.integers(0, len(row))) for row in rows]]])
    valid = torch.arange(longest) < length[..., None]
    key, order = sort_key(score, position.int(), protected, valid).sort(dim=-1)
    known = SimpleNamespace(block=None, length=length[0], position=position.int())
    ranking = Ranking(known, score, protected)  # type: ignore[arg-type]
    lowest = ranking.ranked.lowest(count, int(count.max()))
    for r in range(len(rows)):
        assert set(lowest[0, 0, r].nonzero()[:, 0].tolist()) == set(order[0, 0, r, : count[0, 0, r]].tolist())
    assert torch.equal(ranking.sorted_score, score_of(key))


def test_ranks_give_places() -> None:
    assert ranks(torch.tensor([[3.0, 1.0, 2.0, 1.0]])).tolist() == [[3, 0, 2, 1]]
