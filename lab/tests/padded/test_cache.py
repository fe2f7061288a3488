"""The padded cache against a list of tokens for each row."""

import random

import pytest
import torch
from hypothesis import given, strategies as st

from winnow_lab.padded.cache import KVShape, LayerShape, PaddedCache, QueryKVs, Shape

SHAPE = KVShape((LayerShape(2, 3, 4, torch.float32), LayerShape(1, 5, 5, torch.float64)))
CPU = torch.device("cpu")


class Model:
    """Hands out KVs that are different for every token, and writes them as attention layers would."""

    def __init__(self) -> None:
        self.cache = PaddedCache(SHAPE, CPU)
        self.rows: list[list[int]] = []
        """The oracle: the tokens of each row."""
        self._next = 1

    def tokens(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def kvs(self, tokens: list[int]) -> QueryKVs:
        layers = []
        for layer in SHAPE.layers:
            values = torch.tensor(tokens, dtype=layer.dtype)[None, :, None]
            layers.append(
                (
                    values.expand(layer.num_heads, -1, layer.key_dim),
                    -values.expand(layer.num_heads, -1, layer.value_dim),
                )
            )
        return QueryKVs(tuple(layers))

    def room(self, rows: int, left: int, right: int) -> None:
        if not self.cache.has_room(rows, left, right):
            columns = left + self.cache.columns + right
            self.cache.resize(Shape(max(rows, self.cache.rows), columns), left)

    def write_columns(self, grid: list[list[int]]) -> None:
        """What a forward pass does: every row's new columns, padding being -1."""
        self.cache.begin()
        held = self.cache.columns
        rows = [self.kvs(row) for row in grid]
        for index in range(len(SHAPE.layers)):
            keys, values = self.cache.update(
                torch.stack([row.layers[index][0] for row in rows]),
                torch.stack([row.layers[index][1] for row in rows]),
                index,
            )
            assert keys.shape[2] == values.shape[2] == held + len(grid[0])

    def check(self) -> None:
        cache = self.cache
        assert cache.lengths == [len(row) for row in self.rows]
        assert cache.longest <= cache.least_columns <= cache.columns
        for row, tokens in enumerate(self.rows):
            expected = self.kvs(tokens)
            for found, wanted in zip(cache.view(row).layers, expected.layers, strict=True):
                assert all(f.equal(w) for f, w in zip(found, wanted, strict=True))
        for layer in cache.layers:
            assert all(tensor.isfinite().all() for tensor in layer.tensors)


ACTIONS = ["join", "step", "shape", "drop", "clear", "release", "resize"]


@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=40), seed=st.integers(0, 2**16))
def test_random_actions(actions: list[str], seed: int) -> None:
    rng, model = random.Random(seed), Model()
    cache = model.cache
    for action in actions:
        row = rng.randrange(len(model.rows)) if model.rows else None
        if action == "join":
            tokens = model.tokens(rng.randint(1, 12))
            model.room(cache.rows + 1, max(len(tokens) - cache.columns, 0), 0)
            [new] = cache.add_rows(1)
            cache.write(new, model.kvs(tokens))
            model.rows.append(tokens)
        elif action == "step" and model.rows:
            model.room(cache.rows, 0, 1)
            tokens = model.tokens(cache.rows)
            model.write_columns([[token] for token in tokens])
            live = [int(bool(held)) for held in model.rows]
            cache.advance(live)
            for held, token, count in zip(model.rows, tokens, live, strict=True):
                held += [token] * count
        elif action == "shape" and model.rows:
            joined = [model.tokens(rng.randint(1, 9)) for _ in range(rng.randint(1, 2))]
            width = max(map(len, joined))
            keep_gaps = rng.random() < 0.5
            left = width - 1 if keep_gaps else max(width - cache.columns - 1, 0)
            model.room(cache.rows + len(joined), left, width)
            before = cache.least_columns
            others = model.tokens(cache.rows)
            new = cache.add_rows(len(joined))
            padding = [-1] * (width - 1)
            model.write_columns(
                [[token, *padding] for token in others]
                + [[-1] * (width - len(tokens)) + tokens for tokens in joined]
            )
            counts = [1] * len(others) + [len(tokens) for tokens in joined]
            cache.advance_shaped(counts, list(new), keep_gaps=keep_gaps)
            assert cache.least_columns == max(before + (width if keep_gaps else 1), width)
            for held, token in zip(model.rows, others, strict=True):
                held.append(token)
            model.rows += joined
        elif action == "drop" and row is not None:
            moved = cache.drop(row)
            model.rows[row] = model.rows[moved]
            model.rows.pop()
        elif action == "clear" and row is not None:
            cache.clear(row)
            model.rows[row] = []
        elif action == "release":
            held = [layer.keys.data_ptr() for layer in cache.layers]
            cache.release_front()
            assert cache.columns == cache.least_columns
            assert held == [layer.keys.data_ptr() for layer in cache.layers], "nothing is copied"
        elif action == "resize":
            cache.resize(
                Shape(cache.rows + rng.randint(0, 2), cache.columns + rng.randint(2, 9)), rng.randint(0, 2)
            )
        model.check()


def test_a_step_copies_nothing() -> None:
    model = Model()
    model.room(1, 5, 20)
    model.cache.add_rows(1)
    model.cache.write(0, model.kvs(model.tokens(5)))
    before = model.cache.layers[0].keys.data_ptr()
    for _ in range(20):
        model.write_columns([model.tokens(1)])
        model.cache.advance([1])
    assert model.cache.layers[0].keys.data_ptr() == before
    assert model.cache.columns == 25


def test_what_a_query_leaves_behind_is_finite_for_the_next() -> None:
    model = Model()
    model.room(2, 8, 4)
    broken = QueryKVs(
        tuple((k * float("nan"), v * float("inf")) for k, v in model.kvs(model.tokens(8)).layers)
    )
    model.cache.add_rows(2)
    for row in (0, 1):
        model.cache.write(row, broken)
    model.cache.drop(0)
    model.cache.write(0, model.kvs(model.tokens(3)))
    model.cache.add_rows(1)
    model.write_columns([[1], [2]])
    keys, values = model.cache.layers[0].keys[:2], model.cache.layers[0].values[:2]
    assert keys.isfinite().all() and values.isfinite().all()


def test_an_interrupted_pass_leaves_no_trace() -> None:
    model = Model()
    model.room(1, 3, 4)
    model.cache.add_rows(1)
    model.rows.append(model.tokens(3))
    model.cache.write(0, model.kvs(model.rows[0]))
    one = model.kvs(model.tokens(1)).layers[0]
    model.cache.update(one[0][None], one[1][None], 0)  # the second layer is never reached
    with pytest.raises(AssertionError, match="a layer was left out"):
        model.cache.advance([1])
    model.cache.begin()
    model.check()


@pytest.mark.parametrize("rows", [1, 3])
def test_bytes(rows: int) -> None:
    cache = PaddedCache(SHAPE, CPU)
    cache.resize(Shape(rows, 10))
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors)
    assert cache.nbytes == held == rows * 10 * SHAPE.nbytes
    assert SHAPE.nbytes == 2 * (3 + 4) * 4 + 1 * (5 + 5) * 8
    cache.add_rows(rows)
    before = cache.nbytes
    peak = cache.resize(Shape(rows, 20))
    assert max(before, cache.nbytes) < peak <= cache.nbytes + rows * 20 * SHAPE.largest_layer
