"""Forks, beams, windows and reservations in the ledger against a naive model: tables of blocks that count holders."""

from typing import Any

import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from winnow.cache import CacheLayout, CacheSize, Ledger, OutOfBlocksError

LAYERS, MAX_SEQS, MAX_LEN = 2, 6, 400


class Block:
    """A block of the naive model: it knows which KVs it holds, nothing else."""

    def __init__(self, kvs: tuple[int, ...] = ()) -> None:
        self.kvs = kvs


Table = list[Block]


class ForkMachine(RuleBasedStateMachine):
    """Heads are alike, so the naive model has one table per sequence and layer."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        window=st.sampled_from([None, 1, 2, 5, 9]),
        num_blocks=st.integers(40, 160),
    )
    def start(self, block_size: int, window: int | None, num_blocks: int) -> None:
        layout = CacheLayout.even(LAYERS, 1, 2, block_size, torch.float32, windows=(None, window))
        self.ledger = Ledger(layout, CacheSize.of_blocks(layout, num_blocks, MAX_SEQS, MAX_LEN))
        self.window, self.size = window, block_size
        self.tables: dict[int, list[Table]] = {}
        self.lengths: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.marks = 0

    # -- the naive model -------------------------------------------------------------------------------------------

    def _holders(self, block: Block) -> int:
        return sum(each is block for tables in self.tables.values() for table in tables for each in table)

    def _append(self, slot: int, count: int) -> None:
        for _ in range(count):
            self.marks += 1
            for layer, table in enumerate(self.tables[slot]):
                index, offset = divmod(self.lengths[slot][layer], self.size)
                if index == len(table):
                    table.append(Block())
                elif offset and self._holders(table[index]) > 1:
                    table[index] = Block(table[index].kvs)
                if not offset:
                    table[index].kvs = ()
                table[index].kvs += (self.marks,)
                self.lengths[slot][layer] += 1

    def _fork(self, parent: int, child: int) -> None:
        used = [-(-length // self.size) for length in self.lengths[parent]]
        self.tables[child] = [table[:n] for table, n in zip(self.tables[parent], used, strict=True)]
        self.lengths[child] = list(self.lengths[parent])
        self.reserved[child] = 0

    def _forget(self, slot: int) -> None:
        del self.tables[slot], self.lengths[slot], self.reserved[slot]

    # -- rules -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ledger.num_free_slots)
    @rule()
    def open(self) -> None:
        slot = self.ledger.open()
        self.tables[slot], self.lengths[slot] = [[] for _ in range(LAYERS)], [0] * LAYERS
        self.reserved[slot] = 0

    def _draw(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tables)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.tables)), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, 12)) for _ in slots]
        if any(max(self.lengths[s]) + n > MAX_LEN for s, n in zip(slots, counts, strict=True)):
            return
        demand, free = self.ledger.demand(slots, counts), self.ledger.allocator.num_free
        if not self.ledger.has_room_for(demand):
            try:
                self.ledger.append(slots, counts)
            except OutOfBlocksError:
                assert self.ledger.allocator.num_free == free
                return
            raise AssertionError("append took what was not there")
        self.ledger.append(slots, counts)
        assert free - self.ledger.allocator.num_free <= demand.blocks
        for slot, count in zip(slots, counts, strict=True):
            self._append(slot, count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self._draw(data)
        if self.ledger.can_fork(parent):
            self._fork(parent, self.ledger.fork(parent))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def choose_beams(self, data: st.DataObject) -> None:
        """Some of the sequences go on, once or more often, and the others end: as many as there were before."""
        beams = sorted(self.tables)
        parents = [data.draw(st.sampled_from(beams)) for _ in beams]
        for ended in set(beams) - set(parents):
            self.ledger.close(ended)
            self._forget(ended)
        for parent in set(parents):
            for _ in range(parents.count(parent) - 1):
                if self.ledger.can_fork(parent):
                    self._fork(parent, self.ledger.fork(parent))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.tables)), min_size=1, unique=True))
        free = self.ledger.allocator.num_free
        self.ledger.drop_unseen(slots)
        assert self.ledger.allocator.num_free >= free
        for slot in slots:
            if self.window is None or self.reserved[slot]:
                continue
            # Block by block, while no later token sees any KV of the first one.
            while self.lengths[slot][1] - self.size >= self.window - 1 and self.lengths[slot][1] >= self.size:
                del self.tables[slot][1][0]
                self.lengths[slot][1] -= self.size
            assert self.lengths[slot][1] < self.window - 1 + self.size or not self.tables[slot][1]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_kvs=st.integers(1, 60))
    def reserve(self, data: st.DataObject, num_kvs: int) -> None:
        slot, blocks = self._draw(data), -(-num_kvs // self.size)
        lacking = sum(max(blocks - len(table), 0) for table in self.tables[slot])
        used = self.ledger.allocator.num_used
        try:
            self.ledger.reserve(slot, num_kvs)
        except OutOfBlocksError:
            assert self.ledger.allocator.num_used == used
            return
        assert self.ledger.allocator.num_used == used + lacking
        for table in self.tables[slot]:
            table.extend(Block() for _ in range(blocks - len(table)))
        self.reserved[slot] = max(blocks, self.reserved[slot])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        slot = self._draw(data)
        if self.ledger._shared.can_own(slot):
            self.ledger._shared.own(slot)
            for table in self.tables[slot]:
                table[:] = [Block(b.kvs) if self._holders(b) > 1 else b for b in table]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = self._draw(data)
        self.ledger.close(slot)
        self._forget(slot)

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def the_same_blocks_are_shared(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.take_update()
        self.ledger.check_integrity()
        one: dict[int, Block] = {}
        for slot, tables in self.tables.items():
            assert self.ledger.lengths[slot, :, 0].tolist() == self.lengths[slot]
            assert self.ledger.blocks_held(slot) == sum(map(len, tables))
            ids = iter(self.ledger.blocks_of(slot).tolist())
            for layer, table in enumerate(tables):
                for block in table[: -(-self.lengths[slot][layer] // self.size)]:
                    assert one.setdefault(next(ids), block) is block, (
                        "a block of the ledger is two of the model's"
                    )
            assert next(ids, None) is None
        distinct = {id(b) for tables in self.tables.values() for table in tables for b in table}
        assert len({id(b) for b in one.values()}) == len(one)
        assert self.ledger.allocator.num_used == len(distinct)
        used: dict[int, int] = {}
        for slot, tables in self.tables.items():
            for layer, table in enumerate(tables):
                for index, block in enumerate(table):
                    filled = min(max(self.lengths[slot][layer] - index * self.size, 0), self.size)
                    used[id(block)] = max(used.get(id(block), 0), filled)
        assert int(self.ledger._rows.filled_slots(self.ledger.size.num_blocks).sum()) == sum(used.values())

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for slot in list(self.tables):
                self.ledger.close(slot)
            self.ledger.check_integrity()
            assert self.ledger.allocator.num_used == 0, "blocks leaked"


TestForks: Any = ForkMachine.TestCase
TestForks.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
