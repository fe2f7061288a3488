"""Prefixes in the ledger against a naive model, and what is shared only as long as nobody changes it."""

import random
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from winnow.cache import CacheLayout, CacheSize, Ledger, OutOfBlocksError
from winnow.cache.prefix_index import PrefixChain

LAYOUT = CacheLayout(2, 2, 4, 4, "float32")
SIZE, ROWS, MAX_SEQS, MAX_LEN = 4, 4, 5, 60


class PrefixMachine(RuleBasedStateMachine):
    """The naive model notes for each block of the pool which tokens its KVs follow from; a change makes them unique."""

    @initialize(num_blocks=st.integers(ROWS * 8, ROWS * 40))
    def start(self, num_blocks: int) -> None:
        self.ledger = Ledger(LAYOUT, CacheSize.of_blocks(LAYOUT, num_blocks, MAX_SEQS, MAX_LEN))
        self.content: dict[int, tuple[object, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.chains: dict[int, PrefixChain] = {}
        self.changed: set[int] = set()
        self.unique = count()
        self.ever: set[tuple[object, ...]] = set()

    @precondition(lambda self: self.ledger.num_free_slots)
    @rule(salt=st.sampled_from(["", "other"]), seed=st.integers(0, 5), length=st.integers(1, 40))
    def open(self, salt: str, seed: int, length: int) -> None:
        """A prompt that begins like others, after what is known of it."""
        tokens = random.Random(seed % 3).choices([1, 2], k=min(length, 16))
        tokens += random.Random(seed).choices([1, 2], k=max(length - 16, 0))
        slot, chain = self.ledger.open(), PrefixChain(salt, SIZE)
        chain.extend(tokens)
        keys = self.ledger.prefixes.match(chain, length - 1)
        held = len(keys) * SIZE
        assert held < length
        self.tokens[slot], self.chains[slot] = [], chain
        self.ledger.adopt(slot, keys)
        assert (self.ledger.lengths[slot] == held).all()
        for index in range(len(keys)):
            known = (salt, *tokens[: (index + 1) * SIZE])
            assert known in self.ever
            assert [self.content[block] for block in self._column(slot, index)] == [known] * ROWS
        self.tokens[slot] = tokens[:held]
        self._append(slot, tokens[held:])

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
                self.ledger.remember(slot, index, *self.chains[slot].links[index])
                self.ever.add((self._salt(slot), *self.tokens[slot][: (index + 1) * SIZE]))

    def _salt(self, slot: int) -> str:
        return self.chains[slot].salt

    def _column(self, slot: int, index: int) -> list[int]:
        """Block `index` of each row."""
        blocks = iter(self.ledger.blocks_of(slot).tolist())
        counts = (-(-self.ledger.lengths[slot] // SIZE)).ravel().tolist()
        rows = [[next(blocks) for _ in range(n)] for n in counts]
        return [row[index] for row in rows]

    @precondition(lambda self: set(self.tokens) - self.changed)
    @rule(data=st.data(), more=st.integers(1, 9))
    def decode(self, data: st.DataObject, more: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.tokens) - self.changed)))
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
        for block in self.ledger.blocks_of(slot).tolist():
            self.content[block] = ("changed", next(self.unique))
        self.changed.add(slot)
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
        self.ledger.take_update()
        self.ledger.check_integrity()
        held = {block for slot in self.tokens for block in self.ledger.blocks_of(slot).tolist()}
        assert self.ledger.allocator.num_used == len(held)


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def chain_of(tokens: list[int], salt: str = "") -> PrefixChain:
    chain = PrefixChain(salt, SIZE)
    chain.extend(tokens)
    return chain


def remembered(ledger: Ledger, tokens: list[int]) -> None:
    """Compute and remember a prompt, and end."""
    slot, chain = ledger.open(), chain_of(tokens)
    ledger.append([slot], [len(tokens)])
    for index, link in enumerate(chain.links):
        ledger.remember(slot, index, *link)
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
    ledger.adopt(slot := ledger.open(), ledger.prefixes.match(chain_of(a), 16))
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
