"""Prefixes in the ledger against a naive model, and blocks shared only while unchanged."""

import random
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from winnow.cache import (
    BlockCopies,
    CacheLayout,
    CacheSize,
    CopyDiscarded,
    Ledger,
    OutOfBlocksError,
    RowsRestored,
    RowsSaved,
)
from winnow.cache.accounting.prefix_chain import PrefixChain, Snapshot
from winnow.cache.layout import IntArray

LAYOUT = CacheLayout.even(2, 2, 4, 4, "float32")
SIZE, ROWS, MAX_SEQS, MAX_LEN = 4, 4, 5, 60
HOST = LAYOUT.host_bytes([ROWS * 30])
SALTS, RULE = ["", "other"], b"rule"


class PrefixMachine(RuleBasedStateMachine):
    """The naive model notes for each block of the pool what its KVs follow from; a change makes them unique.

    What a round leaves follows from salt, tokens and rule alone, and is never seen to differ where it is shared.
    """

    @initialize(num_blocks=st.integers(ROWS * 8, ROWS * 40))
    def start(self, num_blocks: int) -> None:
        self.ledger = Ledger(LAYOUT, CacheSize.of_blocks(LAYOUT, num_blocks, MAX_SEQS, MAX_LEN), HOST)
        self.content: dict[int, tuple[object, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.chains: dict[int, PrefixChain] = {}
        self.changed: set[int] = set()
        self.compressed: set[int] = set()
        self.host: dict[int, list[tuple[object, ...]]] = {}
        self.parked: dict[int, tuple[list[int], PrefixChain, str]] = {}
        self.unique = count()
        self.ever: set[tuple[object, ...]] = set()

    def follow(self) -> None:
        """Make the copies of the ledger's update, those to and from host memory too."""
        for each in self.ledger.take_update().copies:
            if isinstance(each, BlockCopies):
                for source, target in zip(each.source.tolist(), each.target.tolist(), strict=True):
                    self.content[target] = self.content[source]
            elif isinstance(each, RowsSaved):
                self.host[each.host_id] = [self.content[block] for block in each.blocks.tolist()]
            elif isinstance(each, RowsRestored):
                self.content |= dict(zip(each.blocks.tolist(), self.host[each.host_id], strict=True))
            elif isinstance(each, CopyDiscarded):
                del self.host[each.host_id]

    @precondition(lambda self: self.ledger.num_free_slots)
    @rule(
        salt=st.sampled_from(SALTS),
        seed=st.integers(0, 5),
        length=st.integers(1, 40),
        compresses=st.booleans(),
    )
    def open(self, salt: str, seed: int, length: int, compresses: bool) -> None:
        """A prompt that begins like others, after what is known of it."""
        tokens = random.Random(seed % 3).choices([1, 2], k=min(length, 16))
        tokens += random.Random(seed).choices([1, 2], k=max(length - 16, 0))
        slot, chain = self.ledger.open(), PrefixChain(salt, SIZE)
        chain.extend(tokens)
        if compresses and (found := self._longest_snapshot(chain, tokens)) is not None:
            self._resume(slot, chain, tokens, found)
            return
        keys = self.ledger.prefixes.match(chain, length - 1)
        held = len(keys) * SIZE
        assert held < length
        self.tokens[slot], self.chains[slot] = [], chain
        self.ledger.prefix_rows.adopt(slot, keys)
        assert (self.ledger.lengths[slot] == held).all()
        for index in range(len(keys)):
            known = (salt, *tokens[: (index + 1) * SIZE])
            assert known in self.ever
            assert [self.content[block] for block in self._column(slot, index)] == [known] * ROWS
        self.tokens[slot] = tokens[:held]
        self._append(slot, tokens[held:])

    def _longest_snapshot(self, chain: PrefixChain, tokens: list[int]) -> Snapshot | None:
        for n in range(len(tokens) - 1, 0, -1):
            key = chain.snapshot_key(tokens[:n], RULE)
            found = self.ledger.prefixes.snapshot(key, tokens[:n], "rule")
            assert self.ledger.prefixes.snapshot(key, tokens[:n], "other rule") is None
            if found is not None and self.ledger.prefix_rows.has_pages_for(found):
                return found
        return None

    def _resume(self, slot: int, chain: PrefixChain, tokens: list[int], found: Snapshot) -> None:
        state = (chain.salt, *tokens[: found.num_tokens])
        self.ledger.prefix_rows.resume(slot, found)
        self.follow()
        assert self.ledger.lengths[slot].tolist() == left_of(state).tolist()
        assert [self.content[block] for block in self.ledger.blocks_of(slot).tolist()] == self._kept(state)
        self.tokens[slot], self.chains[slot] = tokens[: found.num_tokens], chain
        self.compressed.add(slot)
        self._append_to_compressed(slot, tokens[found.num_tokens :])

    def _kept(self, state: tuple[object, ...]) -> list[tuple[object, ...]]:
        """What stands in the blocks, row by row, that a round left."""
        counts = (-(-left_of(state) // SIZE)).ravel().tolist()
        return [("kept", state, row, index) for row, n in enumerate(counts) for index in range(n)]

    def _append_to_compressed(self, slot: int, tokens: list[int]) -> None:
        before = self.ledger.lengths[slot] // SIZE
        try:
            self.ledger.append([slot], [len(tokens)])
        except OutOfBlocksError:
            self.close(slot)
            return
        self.follow()
        self.tokens[slot] += tokens
        for index in range(-(-int(self.ledger.lengths[slot].max()) // SIZE)):
            for block, whole in zip(
                self._column(slot, index, missing=True), before.ravel().tolist(), strict=True
            ):
                if block is not None and index >= whole:
                    assert self.ledger.allocator.holders[block] == 1
                    self.content[block] = ("own", next(self.unique))

    @precondition(lambda self: set(self.tokens) - self.changed - self.compressed)
    @rule(data=st.data())
    def compress(self, data: st.DataObject) -> None:
        """A round that every prompt has there, and what it leaves is remembered."""
        slot = data.draw(st.sampled_from(sorted(set(self.tokens) - self.changed - self.compressed)))
        if not self.ledger.own_or_forget(slot):
            return
        self.follow()
        state = (self._salt(slot), *self.tokens[slot])
        self.ledger.shrink([slot], left_of(state)[None])
        for block, content in zip(self.ledger.blocks_of(slot).tolist(), self._kept(state), strict=True):
            self.content[block] = content
        self.compressed.add(slot)
        key = self.chains[slot].snapshot_key(self.tokens[slot], RULE)
        used, known = self.ledger.allocator.num_used, self.ledger.prefixes.knows(key)
        room = int((left_of(state) % SIZE > 0).sum()) <= self.ledger.allocator.num_free
        self.ledger.prefix_rows.take_snapshot(slot, key, self.tokens[slot], "rule")
        assert self.ledger.prefixes.knows(key) == (known or room)
        assert self.ledger.allocator.num_used == used

    @precondition(lambda self: self.compressed)
    @rule(data=st.data(), more=st.integers(1, 9))
    def go_on(self, data: st.DataObject, more: int) -> None:
        """A question behind what a round left, or an answer."""
        slot = data.draw(st.sampled_from(sorted(self.compressed)))
        more = min(more, MAX_LEN - len(self.tokens[slot]))
        if more:
            self._append_to_compressed(slot, [1] * more)

    def _append(self, slot: int, tokens: list[int]) -> None:
        try:
            self.ledger.append([slot], [len(tokens)])
        except OutOfBlocksError:
            assert self.ledger.demand([slot], [len(tokens)]).blocks > self.ledger.allocator.num_free
            self.close(slot)
            return
        done = len(self.tokens[slot])
        self.tokens[slot] += tokens
        self.chains[slot].extend(self.tokens[slot])
        for index in range(done // SIZE, -(-len(self.tokens[slot]) // SIZE)):
            for block in self._column(slot, index):
                self.content[block] = (self._salt(slot), *self.tokens[slot][: (index + 1) * SIZE])
        if slot not in self.changed:
            for index in range(done // SIZE, len(self.tokens[slot]) // SIZE):
                self.ledger.prefix_rows.remember(slot, index, *self.chains[slot].links[index])
                self.ever.add((self._salt(slot), *self.tokens[slot][: (index + 1) * SIZE]))

    def _salt(self, slot: int) -> str:
        return self.chains[slot].salt

    def _column(self, slot: int, index: int, missing: bool = False) -> list[int | None]:
        """Block `index` of each row; None where a row is `missing` it."""
        blocks = iter(self.ledger.blocks_of(slot).tolist())
        counts = (-(-self.ledger.lengths[slot] // SIZE)).ravel().tolist()
        rows = [[next(blocks) for _ in range(n)] for n in counts]
        return [row[index] if index < len(row) or not missing else None for row in rows]

    @precondition(lambda self: set(self.tokens) - self.changed - self.compressed)
    @rule(data=st.data(), more=st.integers(1, 9))
    def decode(self, data: st.DataObject, more: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.tokens) - self.changed - self.compressed)))
        more = min(more, MAX_LEN - len(self.tokens[slot]))
        if more:
            self._append(slot, data.draw(st.lists(st.sampled_from([1, 2]), min_size=more, max_size=more)))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        """A round, or queries that add to accumulators: the sequence has its blocks for itself first."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        if not self.ledger.own_or_forget(slot):
            others = [s for s in self.tokens if s != slot]
            mine = set(self.ledger.blocks_of(slot).tolist())
            assert any(mine & set(self.ledger.blocks_of(s).tolist()) for s in others)
            return
        assert not self.ledger.is_shared(slot)
        assert (self.ledger.allocator.holders[self.ledger.blocks_of(slot)] == 1).all()
        self.follow()
        for block in self.ledger.blocks_of(slot).tolist():
            self.content[block] = ("changed", next(self.unique))
        self.changed.add(slot)
        self.compressed.discard(slot)
        kept = np.array([data.draw(st.integers(0, n)) for n in self.ledger.lengths[slot].ravel().tolist()])
        self.ledger.shrink([slot], kept.reshape(1, 2, 2).astype(np.int32))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(sorted(self.tokens))))

    def close(self, slot: int) -> None:
        self.ledger.close(slot)
        del self.tokens[slot], self.chains[slot]
        self.changed.discard(slot)
        self.compressed.discard(slot)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """A sequence goes to host memory, also where its blocks are shared."""
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        if not self.ledger.host.has_room_for(self.ledger.host.nbytes(self.ledger.lengths[slot])):
            return
        kind = "changed" if slot in self.changed else "compressed" if slot in self.compressed else "plain"
        host_id = self.ledger.save(slot)
        self.parked[host_id] = self.tokens[slot], self.chains[slot], kind
        self.close(slot)
        self.follow()

    @precondition(lambda self: self.parked and self.ledger.num_free_slots)
    @rule(data=st.data(), ends=st.booleans())
    def swap_in(self, data: st.DataObject, ends: bool) -> None:
        """It comes back to blocks of its own, bit by bit, or ends there."""
        host_id = data.draw(st.sampled_from(sorted(self.parked)))
        if not ends:
            if not self.ledger.has_room_for(self.ledger.demand_of(host_id, 0)):
                return
            slot, expected = self.ledger.open(), self.host[host_id]
            self.ledger.load(host_id, slot)
            self.follow()
            blocks = self.ledger.blocks_of(slot)
            assert [self.content[block] for block in blocks.tolist()] == expected
            assert (self.ledger.allocator.holders[blocks] == 1).all()
            self.tokens[slot], self.chains[slot], kind = self.parked[host_id]
            if kind != "plain":
                (self.changed if kind == "changed" else self.compressed).add(slot)
        self.ledger.discard(host_id)
        del self.parked[host_id]

    @rule(salt=st.sampled_from(SALTS), seed=st.integers(0, 5), length=st.integers(1, 30))
    def load_from_disk(self, salt: str, seed: int, length: int) -> None:
        """A snapshot that another process saved: it takes free memory, and is the index's alone."""
        tokens = random.Random(seed % 3).choices([1, 2], k=min(length, 16))
        tokens += random.Random(seed).choices([1, 2], k=max(length - 16, 0))
        chain, state = PrefixChain(salt, SIZE), (salt, *tokens)
        chain.extend(tokens)
        key, lengths = chain.snapshot_key(tokens, RULE), left_of(state)
        if self.ledger.prefixes.knows(key):
            return
        free = self.ledger.allocator.num_free
        blocks = self.ledger.prefix_rows.take_blocks_for(lengths)
        assert (blocks is None) == (len(self._kept(state)) > free)
        if blocks is not None:
            self.follow()
            self.content |= dict(zip(blocks.tolist(), self._kept(state), strict=True))
            self.ledger.prefix_rows.keep_snapshot(Snapshot.of(key, tokens, "rule", lengths, blocks))
        assert self.ledger.allocator.num_free == free

    @rule(n=st.integers(1, 40))
    def take_all(self, n: int) -> None:
        """Whatever is free can be had, though the index holds some of it."""
        allocator = self.ledger.allocator
        taken = allocator.allocate(min(n * ROWS, allocator.num_free))
        for block in taken.tolist():
            self.content[block] = ("taken", next(self.unique))
        allocator.release(taken)

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.follow()
        self.ledger.check_integrity()
        for snapshot in self.ledger.prefixes.snapshots.values():
            salts = [salt for salt in SALTS if self._is_of(snapshot, salt)]
            [state] = [(salt, *snapshot.token_ids.tolist()) for salt in salts]
            assert [self.content[block] for block in snapshot.blocks.tolist()] == self._kept(state)
        held = {block for slot in self.tokens for block in self.ledger.blocks_of(slot).tolist()}
        assert self.ledger.allocator.num_used == len(held)

    def _is_of(self, snapshot: Snapshot, salt: str) -> bool:
        chain = PrefixChain(salt, SIZE)
        chain.extend(snapshot.token_ids.tolist())
        return chain.snapshot_key(snapshot.token_ids.tolist(), RULE) == snapshot.key


def left_of(state: tuple[object, ...]) -> IntArray:
    """KVs of each row that a round leaves, int32 [2, 2]: it depends on what it sees alone."""
    drawn = random.Random(repr(state))
    return np.array([drawn.randint(0, len(state) - 1) for _ in range(ROWS)], dtype=np.int32).reshape(2, 2)


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))


def chain_of(tokens: list[int], salt: str = "") -> PrefixChain:
    chain = PrefixChain(salt, SIZE)
    chain.extend(tokens)
    return chain


def remembered(ledger: Ledger, tokens: list[int]) -> None:
    """Compute and remember a prompt, and end."""
    slot, chain = ledger.open(), chain_of(tokens)
    ledger.append([slot], [len(tokens)])
    for index, link in enumerate(chain.links):
        ledger.prefix_rows.remember(slot, index, *link)
    ledger.close(slot)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(LAYOUT, CacheSize.of_blocks(LAYOUT, ROWS * 10, MAX_SEQS, MAX_LEN))


def test_the_least_recently_used_goes_first_and_an_end_before_its_front(ledger: Ledger) -> None:
    a, b = [1] * 16, [2] * 16
    remembered(ledger, a)
    remembered(ledger, b)
    assert ledger.allocator.num_free == ROWS * 10
    assert len(ledger.prefixes.match(chain_of(a), 16)) == 4
    ledger.prefix_rows.adopt(slot := ledger.open(), ledger.prefixes.match(chain_of(a), 16))
    ledger.close(slot)
    ledger.allocator.release(ledger.allocator.allocate(ROWS * 7))
    assert (
        len(ledger.prefixes.match(chain_of(a), 16)) == 3 or len(ledger.prefixes.match(chain_of(b), 16)) == 0
    )
    assert len(ledger.prefixes.match(chain_of(a), 16)) > len(ledger.prefixes.match(chain_of(b), 16))


def test_another_salt_finds_nothing(ledger: Ledger) -> None:
    remembered(ledger, [1] * 16)
    assert ledger.prefixes.match(chain_of([1] * 16, "other"), 16) == []


def test_a_hash_that_two_prefixes_share_gives_no_wrong_answer(ledger: Ledger) -> None:
    remembered(ledger, [1] * 4)
    chain = chain_of([1] * 4)
    chain.links[0] = (chain.links[0][0], (1, 1, 1, 2))
    assert ledger.prefixes.match(chain, 4) == []
