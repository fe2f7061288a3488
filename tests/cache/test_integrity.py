"""`check_integrity` notices what must never be."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from winnow.cache import CacheLayout, CacheSize, Ledger
from winnow.cache.layout import IntArray
from winnow.values.value_tier import ValueTier


def even_layout(tier: ValueTier | None = None) -> CacheLayout:
    return CacheLayout.even(2, 2, 4, 4, torch.float32, num_accumulators=1, value_tier=tier)


LAYOUT = even_layout()


@pytest.fixture
def cache() -> Ledger:
    """Two sequences, of three and of five blocks a row, in slots 0 and 1."""
    cache = Ledger(LAYOUT, CacheSize.fit(LAYOUT, 60 * 1024, 5, 200))
    slots = [cache.open(), cache.open()]
    assert slots == [0, 1]
    cache.append(slots, [9, 17])
    cache.check_integrity()
    return cache


def entries(cache: Ledger, slot: int) -> IntArray:
    """The table entries of a sequence's first row, as they lie in the table."""
    row: IntArray = cache.pages.entries[int(cache.pages.of(slot)[0]), 0, 0]
    return row


def hold_twice(cache: Ledger) -> None:
    entries(cache, 0)[0] = entries(cache, 0)[1]


def share_unknowingly(cache: Ledger) -> None:
    entries(cache, 0)[0] = entries(cache, 1)[0]


def lose_a_block(cache: Ledger) -> None:
    cache.allocator._stacks[0].count -= 1


def miscount(cache: Ledger) -> None:
    cache.allocator.holders[entries(cache, 0)[0]] = 2


def free_a_slot_twice(cache: Ledger) -> None:
    cache._free_slots.append(cache._free_slots[0])


def lengthen_a_free_slot(cache: Ledger) -> None:
    cache.lengths[3] = np.int32(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hold_twice, "slot 0 holds a block twice"),
        (share_unknowingly, r"slots \{0, 1\} share blocks unknowingly"),
        (lose_a_block, "neither free nor held"),
        (miscount, "counts of holders differ"),
        (free_a_slot_twice, "a slot is free twice"),
        (lengthen_a_free_slot, "a free slot has a length"),
    ],
)
def test_damage_is_noticed(cache: Ledger, damage: Callable[[Ledger], None], message: str) -> None:
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


def test_a_row_of_another_kind_is_noticed() -> None:
    layout = even_layout(ValueTier.parse("host:L=1,N=4"))
    cache = Ledger(layout, CacheSize.fit(layout, 60 * 1024, 5, 200))
    slot = cache.open()
    cache.append([slot], [5])
    cache.check_integrity()
    page = cache.pages.entries[cache.pages.of(slot)[0]]
    page[[0, 1]] = page[[1, 0]]  # the layers change their blocks
    with pytest.raises(AssertionError, match="a row holds a block of another kind"):
        cache.check_integrity()
