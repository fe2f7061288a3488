"""The cache against a naive model: any order of open, append, fork, write and close."""

import os
from itertools import count

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from winnow.attention import PagedCache, ReferenceBackend, Spans
from winnow.cache import CacheLayout, CacheManager, CacheSize, KVPool

LAYERS, HEADS, DIM = 2, 2, 4
MAX_SEQS, MAX_LEN = 5, 200


class CacheMachine(RuleBasedStateMachine):
    """The naive model keeps each sequence's KVs as a plain list of marks, and copies it at a fork."""

    @initialize(block_size=st.sampled_from([1, 3, 4, 16]), kibibytes=st.integers(24, 60))
    def start(self, block_size: int, kibibytes: int) -> None:
        self.layout = CacheLayout(LAYERS, HEADS, DIM, block_size, torch.float32, num_scores=1)
        size = CacheSize.fit(self.layout, kibibytes * 1024, MAX_SEQS, MAX_LEN)
        self.manager = CacheManager(self.layout, size)
        self.pool = KVPool(self.layout, size.num_blocks)
        assert self.manager.table_bytes + self.pool.nbytes == size.nbytes(self.layout) <= kibibytes * 1024
        self.backend = ReferenceBackend()
        self.model: dict[int, list[int]] = {}
        self.marks = count(1)

    @precondition(lambda self: self.manager.num_free_slots)
    @rule()
    def open(self) -> None:
        slot = self.manager.open()
        assert slot not in self.model
        self.model[slot] = []

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def append_and_write(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        counts = [
            data.draw(st.integers(1, max(1, min(40, MAX_LEN - len(self.model[slot]))))) for slot in slots
        ]
        if any(len(self.model[s]) + n > MAX_LEN for s, n in zip(slots, counts, strict=True)):
            return
        free, expected = self.manager.allocator.num_free, self.manager.blocks_to_append(slots, counts)
        if not self.manager.can_append(slots, counts):
            try:
                self.manager.append(slots, counts)
            except RuntimeError:
                assert self.manager.allocator.num_free == free
                return
            raise AssertionError("append took what was not there")
        starts = [len(self.model[slot]) for slot in slots]
        copies = self.manager.append(slots, counts)
        assert free - self.manager.allocator.num_free <= expected
        if copies is not None:
            self.pool.copy_blocks(copies.source, copies.target)
        self._write(slots, starts, counts)

    def _write(self, slots: list[int], starts: list[int], counts: list[int]) -> None:
        marks = [next(self.marks) for _ in range(sum(counts))]
        spans = Spans.build(slots, starts, counts, self.manager.host_lengths[slots].max(axis=(1, 2)))
        for layer in range(LAYERS):
            # every layer, head and dimension gets a value of its own
            base = torch.tensor(marks, dtype=torch.float32)[:, None, None] * 100 + layer * 10
            k = base + torch.arange(HEADS)[:, None] + torch.arange(DIM) / 10
            self.backend.write(PagedCache(self.pool, self.manager), spans, layer, k, -k)
        for slot, n in zip(slots, counts, strict=True):
            self.model[slot] += marks[:n]
            marks = marks[n:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        if not self.manager.can_fork(parent):
            return
        used = self.manager.allocator.num_used
        child = self.manager.fork(parent)
        assert self.manager.allocator.num_used == used, "a fork takes no blocks"
        self.model[child] = list(self.model[parent])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.manager.close(slot)
        del self.model[slot]

    @invariant()
    def holds_what_was_written(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        for slot, marks in self.model.items():
            assert (self.manager.host_lengths[slot] == len(marks)).all()
            if marks:
                self._compare(slot, marks)

    def _compare(self, slot: int, marks: list[int]) -> None:
        block_size, n = self.layout.block_size, len(marks)
        for layer in range(LAYERS):
            blocks = self.manager.tables.lookup(torch.tensor([slot]), layer, -(-n // block_size))[0]
            k = self.pool.k[blocks].flatten(1, 2)[:, :n]  # [H, n, d]
            base = (
                torch.tensor(marks, dtype=torch.float32)[:, None] * 100 + layer * 10 + torch.arange(DIM) / 10
            )
            assert torch.equal(k, base + torch.arange(HEADS)[:, None, None])
            assert torch.equal(self.pool.v[blocks].flatten(1, 2)[:, :n], -k)
            assert torch.equal(
                self.pool.position[blocks].flatten(1)[:, :n],
                torch.arange(n, dtype=torch.int32).expand(HEADS, -1),
            )

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for slot in list(self.model):
            self.manager.close(slot)
        self.manager.check_integrity()
        assert self.manager.allocator.num_used == 0, "blocks leaked"
        assert self.manager.num_free_slots == MAX_SEQS
        assert not np.any(self.manager.host_lengths)


TestCache = CacheMachine.TestCase
# 800 runs of up to 50 steps, about 34,000 in all. WINNOW_EXAMPLES asks for more.
TestCache.settings = settings(
    max_examples=int(os.environ.get("WINNOW_EXAMPLES", "800")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
