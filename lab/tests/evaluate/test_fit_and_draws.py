"""What tasks share: the search for what fits, and draws that a larger size does not change."""

import random
from itertools import accumulate, islice

import pytest
from hypothesis import given, strategies as st
from plain_settings import plain_settings

from winnow.errors import EvaluationError
from winnow_lab.evaluate.tasks.draws import chosen, distinct, shuffled
from winnow_lab.evaluate.tasks.task import check_lengths, largest_fitting


@given(st.integers(0, 200), st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 5000))
def test_the_search_finds_what_trying_all_sizes_finds(at_zero: int, steps: list[int], room: int) -> None:
    asked = []

    def cost(size: int) -> int:
        asked.append(size)
        rounds, rest = divmod(size, len(steps))
        return at_zero + rounds * sum(steps) + sum(steps[:rest])

    sizes = [size for size in range(room + 2) if cost(size) <= room]
    asked.clear()
    assert largest_fitting(cost, room) == (max(sizes) if sizes else None)
    assert all(size >= 0 for size in asked)


def test_the_search_is_short_where_units_are_alike() -> None:
    rng = random.Random(0)
    tokens = list(accumulate(rng.randrange(1, 4) for _ in range(300_000)))
    asked = []

    def cost(size: int) -> int:
        asked.append(size)
        return tokens[size]

    size = largest_fitting(cost, 131_072)
    assert size is not None
    assert tokens[size] <= 131_072 < tokens[size + 1]
    assert len(asked) < 15


def test_a_length_beyond_the_model_is_refused() -> None:
    check_lengths(plain_settings(tokens=(512, 4096), max_model_len=4096))
    with pytest.raises(EvaluationError, match="--tokens 4097: the model takes 4096 at most"):
        check_lengths(plain_settings(tokens=(512, 4097), max_model_len=4096))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9))
def test_shuffled_numbers_are_a_permutation_however_many_are_taken(count: int, taken: int, seed: int) -> None:
    whole = list(shuffled(random.Random(seed), count))
    assert sorted(whole) == list(range(count))
    assert list(islice(shuffled(random.Random(seed), count), taken)) == whole[:taken]


def test_every_order_is_as_likely() -> None:
    rng = random.Random(0)
    orders = [tuple(shuffled(rng, 3)) for _ in range(6000)]
    assert len(set(orders)) == 6
    assert all(850 < orders.count(order) < 1150 for order in set(orders))


def test_distinct_values_come_once() -> None:
    rng = random.Random(0)
    assert sorted(islice(distinct(lambda: rng.randrange(20)), 20)) == list(range(20))


@given(st.lists(st.integers(), max_size=20), st.integers(0, 25) | st.none(), st.integers(0, 5))
def test_chosen_items_keep_their_order(items: list[int], samples: int | None, seed: int) -> None:
    places = chosen(random.Random(seed), range(len(items)), samples)
    assert places == sorted(set(places))
    assert len(places) == (len(items) if samples is None else min(samples, len(items)))
