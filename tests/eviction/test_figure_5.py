"""KV-Compress's worked example (Figure 5 and its text in 4.2.2), from metrics to moved KVs.

One layer, two KV heads, blocks of two. The heads hold five and two KVs, and the sequence must give up two blocks: both
come from the first head, and a third would be the lone block of the second. The text gives these numbers; the figure's
metrics are drawn only, so those here are others of the same order.
"""

import pytest
import torch

from winnow.attention.ranked_rows import moves
from winnow.eviction.budgets import above_floor, block_costs, cheapest_blocks, length_without

BLOCK, HELD = 2, (5, 2)
# By logical index. Five KVs are three blocks: the first freed costs 1 (any KV may be that in the half-empty block, so
# the least goes), the second 3 (two more go), the third 6. The lone block of the second head costs 5.
METRICS = ((3.0, 6.0, 1.0, 2.0, 4.0), (5.0, 4.5))


def schedule(excess: int, least: int = 0) -> tuple[list[int], list[int]]:
    """Blocks that each head gives up, and KVs that it keeps."""
    score = torch.full((1, 1, 2, max(HELD)), torch.inf)
    for head, metrics in enumerate(METRICS):
        score[0, 0, head, : len(metrics)] = torch.tensor(sorted(metrics))
    length = torch.tensor([[HELD]])
    cost = above_floor(block_costs(score, length, BLOCK), length, torch.tensor(least), BLOCK)
    freed = cheapest_blocks(cost, torch.tensor([excess]))
    return freed[0, 0].tolist(), length_without(length, freed, BLOCK)[0, 0].tolist()


@pytest.mark.parametrize(
    ("excess", "freed", "kept"),
    [(1, [1, 0], [4, 2]), (2, [2, 0], [2, 2]), (3, [2, 1], [2, 0]), (4, [3, 1], [0, 0])],
)
def test_who_gives_up_how_many_blocks(excess: int, freed: list[int], kept: list[int]) -> None:
    assert schedule(excess) == (freed, kept)


def test_a_floor_of_one_kv_is_equation_16() -> None:
    """Figure 5 evicts a lone block, which eq. 16 leaves out of the domain of m: a floor of one KV does as well."""
    assert schedule(4, least=1) == ([2, 0], [2, 2])


def test_kvs_evicted_and_empty_slots_fill_whole_blocks() -> None:
    """The paper: "the sum count of evicted KVs and empty cache slots is evenly divisible by the block size"."""
    for excess in range(5):
        freed, kept = schedule(excess)
        for before, blocks, after in zip(HELD, freed, kept, strict=True):
            assert (before - after) + (-before % BLOCK) == blocks * BLOCK + (-after % BLOCK)


def test_survivors_in_the_freed_blocks_move_to_the_holes_before_them() -> None:
    """Figure 5.8, Algorithm 1: of the first head 1, 2 and 3 go; 6 and 4 stay, and 4 moves out of the last block."""
    [_, _], [kept, _] = schedule(2)
    metrics = torch.tensor(METRICS[0])
    stays = metrics >= metrics.sort(descending=True).values[kept - 1]
    slots = torch.tensor([20, 21, 8, 9, 30])  # blocks 10, 4 and 15
    source, target = moves(stays, torch.tensor(kept), slots)
    assert (source.tolist(), target.tolist()) == ([30], [20]), "into the first hole, slot 0 of block 10"
    assert stays[:kept].tolist() == [False, True]
