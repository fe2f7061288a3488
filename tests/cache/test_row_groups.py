"""Rows of unequal groups and a state that is no block, both from this file alone, through all that happens to them.

Layer 1 has two heads of another size in another codec. The state adds up the tokens that a sequence has computed.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.extension import needs_extension
from torch import Tensor

from winnow.attention import AttentionBackend, AttentionSpec, ReferenceBackend, Spans, open_backend
from winnow.cache import (
    BlockAllocator,
    BlockCount,
    CacheLayout,
    CacheSize,
    LocalCache,
    OutOfBlocksError,
    RowGroup,
    codec_of,
)
from winnow.cache.accounting.prefix_chain import PrefixChain
from winnow.cache.slot_states import SlotState
from winnow.eviction import AdaptiveRows, EvictionPolicy, Keep, KeyNorm, SequenceEviction, When
from winnow.eviction.evict import EvictionTarget, compact_round, plan_round
from winnow.process.ranks import ALONE

GROUPS = (RowGroup((0, 2), 3, 8, 8, codec_of("float32")), RowGroup((1,), 2, 16, 16, codec_of("int8")))
LAYOUT = CacheLayout(GROUPS, block_size=4, num_accumulators=1, state_bytes=8)
POLICY = EvictionPolicy(KeyNorm(), AdaptiveRows(), Keep(sinks=1, recent=2), When(after_prefill=True))
GROUP = 2  # query heads that share a KV head
NO_SIGNALS: Any = SimpleNamespace(ranks=ALONE)  # the score reads keys alone


class TokenSums(SlotState):
    name = "sums"
    of_prefix = True

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}

    def nbytes(self, slot: int) -> int:
        return 8

    def fork(self, slot: int, to: int) -> None:
        self.sums[to] = self.sums[slot]

    def save(self, slot: int, positions: tuple[int, int] | None = None) -> int:
        return self.sums[slot]

    def load(self, slot: int, saved: int) -> None:
        self.sums[slot] = saved

    def close(self, slot: int) -> None:
        self.sums.pop(slot, None)

    def to_arrays(self, saved: int) -> dict[str, NDArray[Any]]:
        return {"sum": np.array([saved])}

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        return int(arrays["sum"][0])


class Played:
    """A sequence beside plain lists of what each of its rows should hold."""

    def __init__(self, cache: "Cache", slot: int, tokens: list[int] | None = None) -> None:
        self.cache, self.slot, self.tokens = cache, slot, tokens or []
        self.held = [[list(range(len(self.tokens)))] * heads for heads in LAYOUT.heads]

    def like(self, slot: int) -> "Played":
        child = Played(self.cache, slot, list(self.tokens))
        child.held = [[list(row) for row in layer] for layer in self.held]
        return child

    def compute(self, tokens: list[int]) -> None:
        """Append tokens, and compare what their queries get in every layer."""
        local, start = self.cache.local, len(self.tokens)
        local.append([self.slot], [len(tokens)])
        self.tokens += tokens
        sums = self.cache.state.sums
        sums[self.slot] = sums.get(self.slot, 0) + sum(tokens)
        self.held = [[[*row, *range(start, len(self.tokens))] for row in layer] for layer in self.held]
        longest = local.paged.tables.longest([self.slot])
        spans = Spans.build([self.slot], [start], [len(tokens)], longest)
        for layer, heads in enumerate(LAYOUT.heads):
            k, v = (self.vectors(layer, side)[start:] for side in "kv")
            self.cache.backend.prepare(local.paged, spans).write(layer, k, v)
            q = torch.randn(len(tokens), heads * GROUP, k.shape[-1], generator=self.cache.chance)
            found = self.cache.backend.prepare(local.paged, spans).attend(layer, q, AttentionSpec(0.5))[-1]
            torch.testing.assert_close(found, self.attention(layer, q[-1]), atol=2e-5, rtol=1e-4)
        assert sums[self.slot] == sum(self.tokens)

    def vectors(self, layer: int, side: str) -> Tensor:
        """Keys or values, [tokens, heads, d], which follow from the tokens."""
        group = LAYOUT.by_layer[layer]
        rows = []
        for position, token in enumerate(self.tokens):
            seed = 1000 * token + 10 * position + 2 * layer + (side == "k")
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(group.num_kv_heads, group.key_size, generator=generator))
        return torch.stack(rows)

    def attention(self, layer: int, q: Tensor) -> Tensor:
        codec = LAYOUT.by_layer[layer].codec
        k, v = (self.vectors(layer, side) for side in "kv")
        keys, values = codec.keys(codec.encode_keys(k)).float(), codec.values(codec.encode_values(v)).float()
        out = []
        for head, row in enumerate(self.held[layer]):
            for query in q[GROUP * head : GROUP * (head + 1)]:
                out.append((keys[row, head] @ query * 0.5).softmax(0) @ values[row, head])
        return torch.stack(out)

    def evict(self, budget: int) -> None:
        """Keep `budget` KVs a row on average, those with the least norms of keys."""
        local = self.cache.local
        eviction = SequenceEviction(POLICY, budget, len(self.tokens), len(self.tokens))
        local.ledger._shared.own(self.slot)
        local.sync()
        planned = plan_round(
            local.paged, POLICY, [EvictionTarget(self.slot, eviction, len(self.tokens))], NO_SIGNALS
        )
        compact_round(local.paged, self.cache.backend, planned, NO_SIGNALS)
        local.ledger.shrink([self.slot], planned.lengths)
        local.sync()
        lengths = planned.lengths[0]
        assert not lengths[~LAYOUT.has_row].any()
        # At most as many blocks as the budget says, counted over rows that exist.
        assert LAYOUT.row_blocks(lengths).sum() <= -(-budget * LAYOUT.rows_per_seq // 4) + LAYOUT.rows_per_seq
        assert len(set(lengths[LAYOUT.has_row].tolist())) > 1, "rows compete"
        for layer, heads in enumerate(LAYOUT.heads):
            blocks = local.paged.tables.lookup(torch.tensor([self.slot]), layer, 32)[0]
            positions = local.paged.pool.numbers.positions_of(blocks.long())
            kept = [sorted(positions[head, : lengths[layer, head]].tolist()) for head in range(heads)]
            for head, row in enumerate(kept):
                assert (
                    {0, len(self.tokens) - 2, len(self.tokens) - 1} <= set(row) <= set(self.held[layer][head])
                )
            self.held[layer] = kept


class Cache:
    def __init__(self, backend: AttentionBackend) -> None:
        self.local = LocalCache(LAYOUT, CacheSize.of_blocks(LAYOUT, 480, 4, 64))
        self.backend, self.state, self.chance = backend, TokenSums(), torch.Generator().manual_seed(0)
        self.local.paged.states.add(self.state)
        host = self.local.paged.host
        assert host is not None
        host.limit = self.local.ledger.host.limit = 10**6

    def check(self) -> None:
        self.local.ledger.check_integrity()


@pytest.fixture(params=["reference", pytest.param("native", marks=needs_extension)])
def cache(request: pytest.FixtureRequest) -> Cache:
    if request.param == "native":
        return Cache(open_backend("native", layout=LAYOUT))
    return Cache(ReferenceBackend())


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 99, count).tolist()


def test_blocks_of_kinds_are_counted_apart() -> None:
    first, second = LAYOUT.kinds
    assert (first.form.nbytes, second.form.nbytes) == (4 * 2 * 8 * 4, 4 * 2 * (16 + 2))
    assert LAYOUT.rows_per_seq == 8 and LAYOUT.blocks_for(9) == 24
    size = CacheSize.fit(LAYOUT, 60_000, 4, 64)
    assert size.nbytes(LAYOUT) <= 60_000
    three, one = size.by_kind  # six rows to two
    assert abs(three - 3 * one) <= 4
    local = LocalCache(LAYOUT, size)
    assert local.paged.nbytes + local.ledger.nbytes + size.prefix_state_bytes(LAYOUT) + 4 * 8 == size.nbytes(
        LAYOUT
    )
    slot = local.ledger.open()
    local.append([slot], [9])
    assert local.ledger.allocator.held == (18, 6)
    assert local.ledger.held_bytes == LAYOUT.device_bytes((18, 6))


def test_withheld_blocks_are_free_but_not_taken_before_they_are_granted() -> None:
    allocator = BlockAllocator([6, 4])
    allocator.withhold(1)
    assert allocator.free == (6, 4) and not allocator.has(BlockCount((0, 1)))
    with pytest.raises(OutOfBlocksError, match="0 and 1 blocks asked for"):
        allocator.allocate(1, np.array([1]))
    assert allocator.wanted(1, 3) == range(1, 4)
    allocator.supply(1, 1)
    assert sorted(allocator.allocate(3, np.array([1] * 3)).tolist()) == [7, 8, 9]
    assert not allocator.has(BlockCount((0, 1))) and allocator.free == (6, 1)
    allocator.refusal = "the disk is full"
    assert allocator.free == (6, 0)


def test_a_sequence_grows_and_is_evicted(cache: Cache) -> None:
    played = Played(cache, cache.local.ledger.open())
    played.compute(tokens_of(1, 30))
    played.compute(tokens_of(2, 1))
    before = cache.local.ledger.held_bytes
    played.evict(12)
    assert cache.local.ledger.held_bytes < before / 2
    for count in (1, 7, 1):
        played.compute(tokens_of(count, count))
    cache.check()


def test_forks_share_blocks_and_go_apart(cache: Cache) -> None:
    parent = Played(cache, cache.local.ledger.open())
    parent.compute(tokens_of(1, 22))
    parent.evict(10)
    child = parent.like(cache.local.ledger.fork(parent.slot))
    cache.local.sync()
    cache.local.paged.states.fork(parent.slot, child.slot)
    for seed, each in enumerate((child, parent, child)):
        each.compute(tokens_of(seed, 3))
    child.evict(8)
    parent.compute(tokens_of(9, 1))
    cache.check()


def test_a_swapped_sequence_comes_back_elsewhere(cache: Cache) -> None:
    local = cache.local
    played = Played(cache, local.ledger.open())
    played.compute(tokens_of(1, 26))
    played.evict(9)
    used = local.ledger.host.used_bytes
    host_id = local.ledger.save(played.slot, local.paged.states.nbytes(played.slot))
    held = LAYOUT.by_kind(LAYOUT.row_blocks(local.ledger.lengths[played.slot]))
    assert local.ledger.host.used_bytes - used == LAYOUT.host_bytes(held) + 8
    local.ledger.close(played.slot)
    local.sync()
    other = Played(cache, local.ledger.open())
    other.compute(tokens_of(2, 18))
    played.slot = local.ledger.open()
    local.ledger.load(host_id, played.slot)
    local.ledger.discard(host_id)
    local.sync()
    played.compute(tokens_of(3, 2))
    other.compute(tokens_of(4, 1))
    assert local.paged.host is not None and not local.paged.host.nbytes
    cache.check()


def test_a_prefix_is_found_and_a_snapshot_resumed(cache: Cache) -> None:
    local, tokens = cache.local, tokens_of(5, 24)
    first = Played(cache, local.ledger.open())
    first.compute(tokens)
    chain = PrefixChain("", LAYOUT.block_size)
    chain.extend(tokens)
    key = chain.snapshot_key(tokens, b"rule")
    first.evict(10)
    local.ledger.prefix_rows.take_snapshot(first.slot, key, tokens, "rule")
    local.sync()
    kept = first.like(-1)
    first.compute(tokens_of(6, 5))
    local.ledger.close(first.slot)
    local.sync()
    snapshot = local.ledger.prefixes.snapshot(key, tokens, "rule")
    assert snapshot is not None
    for seed in (7, 8):
        again = kept.like(local.ledger.open())
        local.ledger.prefix_rows.resume(again.slot, snapshot)
        local.sync()
        again.compute(tokens_of(seed, 3))
    cache.check()
    # What a file of it holds comes back as it was.
    arrays = local.paged.states.read(key)
    assert arrays.keys() == {"sums.sum"} and int(arrays["sums.sum"][0]) == sum(tokens)
    local.paged.states.write(b"elsewhere", arrays)
    assert local.paged.states.read(b"elsewhere") == arrays
