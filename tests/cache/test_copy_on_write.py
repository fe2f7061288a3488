"""Shared blocks: who copies, and when."""

import random

import numpy as np
import torch

from winnow.cache import CacheLayout, CacheSize, Ledger
from winnow.cache.layout import ceil_div

ROWS = 6  # 2 layers x 3 heads
LAYOUT = CacheLayout.even(2, 3, 8, 4, torch.float32)


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


def blocks_by_the_paper(width: int, length: int, divergent: int, block_size: int) -> int:
    """kv-cache-memory.txt, "Copy-on-Write for Beam Search": ceil(S/b) + (w - 1) x ceil(divergent tokens / b)."""
    return ceil_div(length, block_size) + (width - 1) * ceil_div(divergent, block_size)


def forked(width: int, length: int, divergent: int, block_size: int) -> int:
    """Blocks per row that sequences of `length` tokens hold together, forked before their last `divergent` ones."""
    layout = CacheLayout.even(2, 1, 2, block_size, torch.float32)
    ledger = Ledger(layout, CacheSize.of_blocks(layout, 2 * 1200, width, 2400))
    parent = ledger.open()
    ledger.append([parent], [length - divergent])
    slots = [parent, *(ledger.fork(parent) for _ in range(width - 1))]
    for _ in range(divergent):
        ledger.append(slots, [1] * width)
    ledger.check_integrity()
    assert ledger.allocator.num_used % layout.rows_per_seq == 0
    return ledger.allocator.num_used // layout.rows_per_seq


def test_the_papers_example() -> None:
    """2,048 tokens, 4 beams, apart in the last 50, blocks of 16: 1.09x, where the paper prints 1.05x (ERRATA)."""
    assert forked(4, 2048, 50, 16) == blocks_by_the_paper(4, 2048, 50, 16) == 140
    assert round(140 / ceil_div(2048, 16), 2) == 1.09
    assert forked(4, 2048, 2048, 16) / ceil_div(2048, 16) == 4, "beams that have nothing in common"


def test_the_papers_formula_may_miss_a_tail_of_each_further_beam() -> None:
    """It counts from a whole block on. A fork within a block copies that one too."""
    chance = random.Random(0)
    for _ in range(60):
        width, block_size = chance.randint(1, 5), chance.choice([1, 3, 16])
        length = chance.randint(1, 300)
        divergent = chance.randint(1, length)
        held = forked(width, length, divergent, block_size)
        formula = blocks_by_the_paper(width, length, divergent, block_size)
        assert formula <= held <= formula + width - 1
        shared = (length - divergent) // block_size
        assert held == shared + width * (ceil_div(length, block_size) - shared)
