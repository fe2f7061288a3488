"""Shared blocks: who copies, and when."""

import numpy as np
import torch

from winnow.cache import CacheLayout, CacheSize, Ledger

ROWS = 6  # 2 layers x 3 heads
LAYOUT = CacheLayout(2, 3, 8, 4, torch.float32)


def ledger_with(num_kvs: int) -> tuple[Ledger, int]:
    ledger = Ledger(LAYOUT, CacheSize.fit(LAYOUT, 200_000, 8, 500))
    slot = ledger.open()
    ledger.append([slot], [num_kvs])
    return ledger, slot


def num_copied(ledger: Ledger) -> int:
    """Blocks that must be copied for what was done since the last call."""
    return sum(len(copies.source) for copies in ledger.take_update().copies)


def test_whoever_writes_first_copies_and_the_last_holder_does_not() -> None:
    ledger, parent = ledger_with(10)
    children = [ledger.fork(parent), ledger.fork(parent)]
    assert ledger.allocator.num_used == ROWS * 3
    ledger.append([parent], [1])
    assert num_copied(ledger) == ROWS
    ledger.append([children[0]], [1])
    assert num_copied(ledger) == ROWS
    ledger.append([children[1]], [1])
    assert num_copied(ledger) == 0
    assert ledger.allocator.num_used == ROWS * (2 + 3), "two full blocks stay shared, three tails are apart"
    ledger.check_integrity()


def test_full_blocks_are_never_copied() -> None:
    ledger, parent = ledger_with(8)
    child = ledger.fork(parent)
    ledger.append([parent, child], [1, 1])
    assert num_copied(ledger) == 0
    assert ledger.allocator.num_used == ROWS * (2 + 2)
    ledger.check_integrity()


def test_blocks_come_back_with_their_last_holder() -> None:
    ledger, parent = ledger_with(10)
    child = ledger.fork(parent)
    ledger.close(parent)
    assert ledger.allocator.num_used == ROWS * 3
    ledger.close(child)
    assert ledger.allocator.num_used == 0
    ledger.check_integrity()


def test_what_an_append_takes_is_known_before() -> None:
    ledger, parent = ledger_with(10)
    child = ledger.fork(parent)
    before = ledger.allocator.num_free
    assert ledger.demand([parent], [3]).blocks == 2 * ROWS, "a copied tail and a new block in every row"
    ledger.append([parent], [3])
    assert before - ledger.allocator.num_free == 2 * ROWS
    assert ledger.demand([child], [1]).blocks == 0, "the other holder is now alone with the old tail"
    ledger.append([child], [1])
    assert before - ledger.allocator.num_free == 2 * ROWS


def test_who_is_left_alone_shares_no_more() -> None:
    ledger, parent = ledger_with(10)
    child = ledger.fork(parent)
    assert ledger.is_shared(parent) and ledger.is_shared(child)
    ledger.close(child)
    assert not ledger.is_shared(parent)
    assert not ledger.any_shared


def test_shrinking_what_is_shared_frees_nothing_before_the_last_holder() -> None:
    ledger, parent = ledger_with(10)
    child, free = ledger.fork(parent), ledger.allocator.num_free
    shorter = np.full((1, 2, 3), 5, dtype=np.int32)
    assert ledger.shrink([parent], shorter).tolist() == [ROWS]
    assert ledger.allocator.num_free == free
    ledger.shrink([child], shorter)
    assert ledger.allocator.num_free == free + ROWS
    ledger.check_integrity()
