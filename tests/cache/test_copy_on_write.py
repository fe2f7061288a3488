"""Shared blocks: who copies, and when."""

import torch

from winnow.cache import CacheLayout, CacheManager, CacheSize

ROWS = 6  # 2 layers x 3 heads
LAYOUT = CacheLayout(2, 3, 8, 4, torch.float32)


def manager_with(num_kvs: int) -> tuple[CacheManager, int]:
    manager = CacheManager(LAYOUT, CacheSize.fit(LAYOUT, 200_000, 8, 500))
    slot = manager.open()
    manager.append([slot], [num_kvs])
    return manager, slot


def test_whoever_writes_first_copies_and_the_last_holder_does_not() -> None:
    manager, parent = manager_with(10)
    children = [manager.fork(parent), manager.fork(parent)]
    assert manager.allocator.num_used == ROWS * 3
    copies = manager.append([parent], [1])
    assert copies is not None and len(copies.source) == ROWS
    copies = manager.append([children[0]], [1])
    assert copies is not None and len(copies.source) == ROWS
    assert manager.append([children[1]], [1]) is None
    assert manager.allocator.num_used == ROWS * (2 + 3), "two full blocks stay shared, three tails are apart"
    manager.check_integrity()


def test_full_blocks_are_never_copied() -> None:
    manager, parent = manager_with(8)
    child = manager.fork(parent)
    assert manager.append([parent, child], [1, 1]) is None
    assert manager.allocator.num_used == ROWS * (2 + 2)
    manager.check_integrity()


def test_blocks_come_back_with_their_last_holder() -> None:
    manager, parent = manager_with(10)
    child = manager.fork(parent)
    manager.close(parent)
    assert manager.allocator.num_used == ROWS * 3
    manager.close(child)
    assert manager.allocator.num_used == 0
    manager.check_integrity()


def test_what_an_append_takes_is_known_before() -> None:
    manager, parent = manager_with(10)
    child = manager.fork(parent)
    before = manager.allocator.num_free
    assert manager.demand([parent], [3]).blocks == 2 * ROWS, "a copied tail and a new block in every row"
    manager.append([parent], [3])
    assert before - manager.allocator.num_free == 2 * ROWS
    # The other holder is now alone with the old tail; that it will not copy is not known without asking the device.
    assert manager.demand([child], [1]).blocks == ROWS
    manager.append([child], [1])
    assert before - manager.allocator.num_free == 2 * ROWS
