"""The cache against a naive model: any order of open, append, restore, write, fork, share, own, evict, save, load
and close.

Memory and tables follow the ledger by its updates alone, each sent as JSON, and at any time.
"""

import json
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from winnow.attention import PagedCache, ReferenceBackend, Spans
from winnow.attention.ranked_rows import moves
from winnow.cache import BlockCopies, CacheLayout, CacheSize, CacheUpdate, Ledger, OutOfBlocksError
from winnow.cache.accounting.host_ledger import OutOfHostMemoryError
from winnow.cache.update import CopyDiscarded, RowLengths, RowsRestored, RowsSaved
from winnow.values.value_tier import ValueTier

LAYERS, HEADS, DIM = 2, 2, 4
MAX_SEQS, MAX_LEN = 5, 200


COPIES: dict[str, Any] = {
    each.__name__: each for each in (BlockCopies, RowsSaved, RowsRestored, CopyDiscarded)
}
HOST_BYTES = 12_000


def as_json(update: CacheUpdate) -> dict[str, object]:
    """The update as numbers and lists."""
    values: dict[str, object] = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in vars(update).items()
    }
    copies = [
        (type(each).__name__, *(v.tolist() if isinstance(v, np.ndarray) else v for v in vars(each).values()))
        for each in update.copies
    ]
    lengths = [(each.slots.tolist(), each.lengths.tolist()) for each in update.lengths]
    return values | {"copies": copies, "lengths": lengths}


def cache_update(values: dict[str, Any]) -> CacheUpdate:
    """What `as_json` was given."""

    def ints(name: str, dtype: type = np.int32) -> Any:
        return np.array(values[name], dtype=dtype)

    return CacheUpdate(
        tuple(values["closed"]),
        tuple(
            COPIES[kind](*(np.array(v, dtype=np.int32) if isinstance(v, list) else v for v in rest))
            for kind, *rest in values["copies"]
        ),
        ints("entries", np.int64),
        ints("blocks"),
        tuple((slot, tuple(pages)) for slot, pages in values["pages"]),
        tuple(
            RowLengths(np.array(slots, dtype=np.int64), np.array(lengths, dtype=np.int32))
            for slots, lengths in values["lengths"]
        ),
    )


# What a sequence holds: by layer and head, the (mark, position) of each KV in any order.
Rows = list[list[list[tuple[int, int]]]]


class CacheMachine(RuleBasedStateMachine):
    """The naive model keeps each row's KVs as a plain list of marks, and copies it at a fork."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        kibibytes=st.integers(24, 60),
        tier=st.sampled_from([None, None, "host:L=1,N=4", "host:L=0,N=4"]),
    )
    def start(self, block_size: int, kibibytes: int, tier: str | None) -> None:
        self.layout = CacheLayout.even(
            LAYERS,
            HEADS,
            DIM,
            block_size,
            torch.float32,
            num_accumulators=1,
            value_tier=ValueTier.parse(tier),
        )
        size = CacheSize.fit(self.layout, kibibytes * 1024, MAX_SEQS, MAX_LEN)
        self.ledger = Ledger(self.layout, size, HOST_BYTES)
        self.cache = PagedCache.allocate(self.layout, size, host_bytes=HOST_BYTES)
        assert self.cache.host is not None
        self.tier = self.cache.host
        self.pool, self.tables = self.cache.pool, self.cache.tables
        assert self.ledger.nbytes + self.cache.nbytes == size.nbytes(self.layout) <= kibibytes * 1024
        self.backend = ReferenceBackend()
        self.model: dict[int, Rows] = {}
        self.tokens: dict[int, int] = {}
        self.saved: dict[int, tuple[Rows, int]] = {}
        self.restoring: set[int] = set()
        self.num_looks = 0
        self.marks = count(1)

    @precondition(lambda self: self.ledger.num_free_slots)
    @rule()
    def open(self) -> None:
        slot = self.ledger.open()
        assert slot not in self.model
        self._empty(slot)

    @rule()
    def sync(self) -> None:
        """The memory follows, from values alone."""
        update = self.ledger.take_update()
        self.cache.apply(cache_update(json.loads(json.dumps(as_json(update)))))
        assert as_json(self.ledger.take_update()) == as_json(CacheUpdate())
        self.restoring.clear()

    @precondition(lambda self: set(self.model) - self.restoring)
    @rule(data=st.data(), closes=st.booleans())
    def save(self, data: st.DataObject, closes: bool) -> None:
        """A copy in host memory; swapping out also closes the sequence."""
        slot = data.draw(st.sampled_from(sorted(set(self.model) - self.restoring)))
        num_blocks = self.layout.by_kind(self.layout.row_blocks(self.ledger.lengths[slot]))
        used, nbytes = self.ledger.host.used_bytes, self.layout.host_bytes(num_blocks)
        if used + nbytes > HOST_BYTES:
            with pytest.raises(OutOfHostMemoryError):
                self.ledger.save(slot)
            assert self.ledger.host.used_bytes == used
            return
        host_id = self.ledger.save(slot)
        assert host_id not in self.saved
        assert self.ledger.host.used_bytes == used + nbytes
        self.saved[host_id] = (
            [[list(row) for row in layer] for layer in self.model[slot]],
            self.tokens[slot],
        )
        if closes:
            self.ledger.close(slot)
            del self.model[slot], self.tokens[slot]

    @precondition(lambda self: self.saved and self.ledger.num_free_slots)
    @rule(data=st.data(), stays=st.booleans())
    def load(self, data: st.DataObject, stays: bool) -> None:
        host_id = data.draw(st.sampled_from(sorted(self.saved)))
        demand = self.ledger.demand_of(host_id, 0)
        free, slot = self.ledger.allocator.free.total, self.ledger.open()
        self._empty(slot)
        if not self.ledger.has_room_for(demand):
            with pytest.raises(OutOfBlocksError):
                self.ledger.load(host_id, slot)
            assert self.ledger.allocator.free.total == free
            return
        self.ledger.load(host_id, slot)
        self.restoring.add(slot)
        assert self.ledger.allocator.free.total == free - demand.blocks
        rows, tokens = self.saved[host_id]
        self.model[slot], self.tokens[slot] = [[list(row) for row in layer] for layer in rows], tokens
        if not stays:
            self.discard(host_id)

    def discard(self, host_id: int) -> None:
        self.ledger.discard(host_id)
        del self.saved[host_id]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def discard_any(self, data: st.DataObject) -> None:
        self.discard(data.draw(st.sampled_from(sorted(self.saved))))

    @precondition(lambda self: self.ledger.num_free_slots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A sequence comes with rows that differ, and its KVs are written where they lie."""
        lengths = np.array(
            [[data.draw(st.integers(0, 60)) for _ in range(HEADS)] for _ in range(LAYERS)], dtype=np.int32
        )
        free, num_blocks = self.ledger.allocator.free.total, -(-lengths // self.layout.block_size)
        slot = self.ledger.open()
        self._empty(slot)
        pages = self.ledger.pages.missing(np.array([slot]), np.array([num_blocks.max()]))
        lacks = not self.ledger.allocator.has(self.layout.by_kind(num_blocks))
        if lacks or pages.sum() > self.ledger.pages.num_free:
            with pytest.raises(OutOfBlocksError):
                self.ledger.restore(slot, lengths)
            assert self.ledger.allocator.free.total == free
            return
        self.ledger.restore(slot, lengths)
        assert self.ledger.allocator.free.total == free - num_blocks.sum()
        self.sync()
        longest = int(lengths.max())
        self.tokens[slot] = longest
        index = self._slots_of([slot], longest)[0] if longest else torch.empty(0)
        for layer, head in np.ndindex(LAYERS, HEADS):
            row = [(next(self.marks), position) for position in range(lengths[layer, head])]
            self.model[slot][layer][head] = row
            for place, (mark, position) in zip(index[layer, head] if row else (), row, strict=False):
                k = mark * 100 + layer * 10 + head + torch.arange(DIM) / 10
                self.pool.of_layer(layer).write(place, k, -k, torch.tensor(position))

    def _empty(self, slot: int) -> None:
        self.model[slot] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
        self.tokens[slot] = 0

    def _longest(self, slot: int) -> int:
        return max(len(row) for layer in self.model[slot] for row in layer)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append_and_write(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, 40)) for _ in slots]
        if any(self._longest(s) + n > MAX_LEN for s, n in zip(slots, counts, strict=True)):
            return
        free, expected = self.ledger.allocator.free.total, self.ledger.demand(slots, counts).blocks
        if not self.ledger.has_room_for(self.ledger.demand(slots, counts)):
            try:
                self.ledger.append(slots, counts)
            except RuntimeError:
                assert self.ledger.allocator.free.total == free
                return
            raise AssertionError("append took what was not there")
        self.ledger.append(slots, counts)
        assert free - self.ledger.allocator.free.total <= expected
        self.sync()
        self._write(slots, counts)

    def _write(self, slots: list[int], counts: list[int]) -> None:
        marks = [next(self.marks) for _ in range(sum(counts))]
        starts = [self.tokens[slot] for slot in slots]
        spans = Spans.build(slots, starts, counts, self.tables.longest(slots))
        for layer in range(LAYERS):
            # every layer, head and dimension gets a value of its own
            base = torch.tensor(marks, dtype=torch.float32)[:, None, None] * 100 + layer * 10
            k = base + torch.arange(HEADS)[:, None] + torch.arange(DIM) / 10
            self.backend.prepare(self.cache, spans).write(layer, k, -k)
        for slot, start, n in zip(slots, starts, counts, strict=True):
            for layer_rows in self.model[slot]:
                for row in layer_rows:
                    row += zip(marks[:n], range(start, start + n), strict=True)
            self.tokens[slot] += n
            marks = marks[n:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        if not self.ledger.can_fork(parent):
            return
        used = self.ledger.allocator.held.total
        child = self.ledger.fork(parent)
        assert self.ledger.allocator.held.total == used, "a fork takes no blocks"
        self._inherit(parent, child)

    def _inherit(self, parent: int, child: int) -> None:
        self.model[child] = [[list(row) for row in layer] for layer in self.model[parent]]
        self.tokens[child] = self.tokens[parent]

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def clear_and_share(self, data: st.DataObject) -> None:
        parent, child = data.draw(st.permutations(sorted(self.model)))[:2]
        self.ledger.clear(child)
        self._empty(child)
        if len(self.ledger.pages.of(parent)) <= self.ledger.pages.num_free:
            self.ledger.share(parent, child)
            self._inherit(parent, child)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if self.ledger._shared.can_own(slot):
            self.ledger._shared.own(slot)
            assert not self.ledger.is_shared(slot)
            assert (self.ledger.allocator.holders[self.ledger.blocks_of(slot)] == 1).all()

    @precondition(lambda self: any(not self.ledger.is_shared(slot) for slot in self.model))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A round over some sequences; what every row loses is left to chance."""
        alone = [slot for slot in sorted(self.model) if not self.ledger.is_shared(slot)]
        slots = data.draw(st.lists(st.sampled_from(alone), min_size=1, unique=True))
        longest = max(self._longest(slot) for slot in slots)
        if not longest:
            return
        self.sync()
        chance = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
        lengths = torch.from_numpy(self.ledger.lengths[slots])
        shape = (len(slots), LAYERS, HEADS, longest)
        stays = (torch.rand(shape, generator=chance) < 0.6) & (torch.arange(longest) < lengths[..., None])
        kept, index = stays.sum(dim=-1), self._slots_of(slots, longest)
        positions = self.pool.position.flatten()[index]
        for b, slot in enumerate(slots):
            for layer, head in np.ndindex(LAYERS, HEADS):
                left = set(positions[b, layer, head][stays[b, layer, head]].tolist())
                row = self.model[slot][layer][head]
                row[:] = [kv for kv in row if kv[1] in left]
        self.backend.compact(self.pool, *moves(stays, kept, index))
        held, free = sum(map(self.ledger.blocks_held, slots)), self.ledger.allocator.free.total
        given = int(self.ledger.shrink(slots, kept.to(torch.int32).numpy()).sum())
        assert given == self.ledger.allocator.free.total - free
        assert given == held - int((-(-kept // self.layout.block_size)).sum())

    def _slots_of(self, slots: list[int], n: int) -> torch.Tensor:
        """Where the first n KVs of each row lie in the pool, [B, layers, heads, n]."""
        block_size, place = self.layout.block_size, torch.arange(n)
        blocks = [
            self.tables.lookup(torch.tensor(slots), layer, -(-n // block_size)).long()
            for layer in range(LAYERS)
        ]
        return torch.stack(blocks, dim=1)[..., place // block_size] * block_size + place % block_size

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.ledger.close(slot)
        del self.model[slot], self.tokens[slot]
        self.restoring.discard(slot)

    @invariant()
    def holds_what_was_written(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        self.num_looks += 1
        if self.num_looks % 3 == 0:  # so that updates hold several changes
            return
        self.sync()
        assert np.array_equal(self.tables.host_lengths, self.ledger.lengths)
        assert self.tier.host_ids == set(self.saved)
        assert self.tier.nbytes == self.ledger.host.used_bytes <= HOST_BYTES
        for slot, layers in self.model.items():
            lengths = [[len(row) for row in layer] for layer in layers]
            assert self.ledger.lengths[slot].tolist() == lengths
            longest = self._longest(slot)
            if longest:
                index = self._slots_of([slot], longest)[0]
                for layer, head in np.ndindex(LAYERS, HEADS):
                    self._compare(layers[layer][head], index[layer, head], layer, head)

    def _compare(self, row: list[tuple[int, int]], index: torch.Tensor, layer: int, head: int) -> None:
        """A KV is where its position says, and has moved whole."""
        # In numpy, which is quicker than torch at thousands of small comparisons.
        slot = index[: len(row)].numpy()
        block, offset = self.pool.numbers.place(slot)
        position = self.pool.position.numpy()[block, offset]
        order = position.argsort()
        block, offset = block[order], offset[order]
        marks, positions = np.array(sorted(row, key=lambda kv: kv[1]), dtype=np.float32).reshape(-1, 2).T
        k = marks[:, None] * 100 + np.float32(layer * 10) + np.arange(DIM, dtype=np.float32) / 10 + head
        assert np.array_equal(position[order], positions)
        pool = self.pool.of_layer(layer)
        assert np.array_equal(pool.k.numpy()[block - pool.first, offset], k)
        assert np.array_equal(pool.v.numpy()[block - pool.first, offset], -k)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for slot in list(self.model):
            self.ledger.close(slot)
        for host_id in list(self.saved):
            self.discard(host_id)
        assert self.ledger.host.used_bytes == 0, "host bytes leaked"
        self.ledger.check_integrity()
        assert self.ledger.allocator.held.total == 0, "blocks leaked"
        assert self.ledger.num_free_slots == MAX_SEQS
        assert not np.any(self.ledger.lengths)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
