"""KVs kept in 16 bits beside narrow ones: which ones attention reads, however they move, and what they cost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.attention import AttentionSpec, ReferenceBackend, Spans
from winnow.cache import CacheLayout, CacheSize, Ledger, LocalCache, PagedCache, codec_of
from winnow.cache.accounting.prefix_chain import PrefixChain
from winnow.errors import ConfigError
from winnow.values.kv_dtype import WideParts

HEADS, DIM = 2, 8
WIDE = WideParts(layers=1, sinks=2, recent=3, dtype="float16")


def open_cache(wide: WideParts = WIDE) -> LocalCache:
    layout = replace(CacheLayout.even(3, HEADS, DIM, 4, codec_of("int2")), wide=wide)
    return LocalCache(layout, CacheSize.of_blocks(layout, 200, 3, 64))


class Played:
    """A sequence beside what each layer was given."""

    def __init__(self, local: LocalCache, seed: int = 0) -> None:
        self.local, self.slot, self.length = local, local.ledger.open(), 0
        self.k, self.v = torch.randn(2, 3, 64, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
        self.held = [list(range(64)) for _ in range(3)]

    def step(self, count: int) -> None:
        """Append tokens, and compare what their last query gets in every layer."""
        self.local.append([self.slot], [count])
        self.length += count
        part = slice(self.length - count, self.length)
        spans = Spans.build([self.slot], [part.start], [count], self.local.paged.tables.longest([self.slot]))
        backend = ReferenceBackend()
        for layer in range(3):
            backend.prepare(self.local.paged, spans).write(layer, self.k[layer, part], self.v[layer, part])
            q = torch.randn(count, HEADS, DIM)
            found = backend.prepare(self.local.paged, spans).attend(layer, q, AttentionSpec(0.5))[-1]
            torch.testing.assert_close(found, self.attention(layer, q[-1]), atol=1e-5, rtol=1e-4)

    def attention(self, layer: int, q: Tensor) -> Tensor:
        """The attention of the newest query over what is left, by the rule."""
        codec = codec_of("int2")
        held = [position for position in self.held[layer] if position < self.length]
        k, v = self.k[layer, held], self.v[layer, held]
        narrow = codec.keys(codec.encode_keys(k)), codec.values(codec.encode_values(v))
        wide = torch.tensor([layer == 0 or p < 2 or p >= self.length - 3 for p in held])[:, None, None]
        k, v = (torch.where(wide, x.half().float(), y) for x, y in zip((k, v), narrow, strict=True))
        p = (torch.einsum("hd,nhd->hn", q, k) * 0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", p, v)

    def evict(self, positions: list[int]) -> None:
        """Move the last KVs of all rows into the slots of others, as a round does."""
        local, ledger = self.local, self.local.ledger
        pool, tables = local.paged.pool, local.paged.tables
        kept = self.length - len(positions)
        for layer in range(3):
            blocks = tables.lookup(torch.tensor([self.slot]), layer, -(-self.length // 4))[0].long()
            slots = pool.numbers.slots_of(blocks)
            at = pool.position.flatten()[slots]
            for head in range(HEADS):
                order = {p: i for i, p in enumerate(at[head, : self.length].tolist())}
                holes = [order[p] for p in positions if order[p] < kept]
                fill = [i for p, i in order.items() if i >= kept and p not in positions]
                pool.move(slots[head, fill], slots[head, holes])
            self.held[layer] = [p for p in self.held[layer] if p not in positions]
        ledger.shrink([self.slot], np.full((1, 3, HEADS), kept))
        local.sync()


def test_attention_reads_wide_what_should_be() -> None:
    played = Played(open_cache())
    for count in (1, 1, 7, 1, 4, 1, 1, 12, 1):
        played.step(count)


def test_wide_kvs_are_found_wherever_their_narrow_ones_lie() -> None:
    played = Played(open_cache())
    played.step(14)
    played.evict([1, 4, 5, 6, 9])
    assert played.local.paged.tables.host_lengths[played.slot].tolist() == [[9, 9]] * 3
    for count in (1, 2, 6):
        played.step(count)


def test_sequences_do_not_see_each_other() -> None:
    local = open_cache()
    first, second = Played(local), Played(local, seed=1)
    for count in (5, 1, 3):
        first.step(count)
        second.step(count + 1)
    local.ledger.close(first.slot)
    local.sync()
    third = Played(local, seed=2)
    assert third.slot == first.slot
    assert all((window.position[third.slot] == -1).all() for window in local.paged.windows)
    third.step(1)
    third.step(2)
    second.step(2)


def test_a_fork_goes_on_by_itself() -> None:
    local = open_cache()
    parent = Played(local)
    parent.step(9)
    child = Played.__new__(Played)
    child.__dict__.update(parent.__dict__)
    child.slot = local.ledger.fork(parent.slot)
    local.sync()
    local.paged.states.fork(parent.slot, child.slot)
    child.k, child.v = parent.k.clone(), parent.v.clone()
    child.k[:, 9:] += 1.0
    for count in (1, 5):
        child.step(count)
        parent.step(count)


def test_a_sequence_is_saved_and_restored() -> None:
    """Its slot is closed and used by another in between, and in the same update as the copy."""
    local = open_cache()
    played, other = Played(local), Played(local, seed=1)
    played.step(9)
    saved = local.paged.states.nbytes(played.slot)
    local.paged.host.limit = local.ledger.host.limit = 10**6
    host_id = local.ledger.save(played.slot, saved)
    parts = [window.save(played.slot) for window in local.paged.windows]
    assert saved == sum(x.nbytes for part in parts for x in part.values())
    local.ledger.close(played.slot)
    other.step(4)
    fill = Played(local, seed=2)
    fill.step(12)
    played.slot = local.ledger.open()
    local.ledger.load(host_id, played.slot)
    local.ledger.discard(host_id)
    for count in (1, 2, 5):
        played.step(count)
    fill.step(1)
    assert not local.paged.states.prefixes


def test_prefixes_keep_what_is_wide_within_bounds() -> None:
    """Blocks bring first tokens and whole layers; the oldest are forgotten where room lacks."""
    local = open_cache()
    ledger, layout, size = local.ledger, local.ledger.layout, local.ledger.size
    limit = size.prefix_state_bytes(layout)
    first = Played(local)
    first.step(20)
    chain = PrefixChain("", 4)
    chain.extend(list(range(20)))
    for index, link in enumerate(chain.links):
        ledger.prefix_rows.remember(first.slot, index, *link)
    ledger.close(first.slot)
    second = Played(local)
    ledger.prefix_rows.adopt(second.slot, ledger.prefixes.match(chain, 20)[:3])
    local.sync()
    second.length = 12
    for count in (4, 1, 3):  # no fewer at first than are recent
        second.step(count)
    ledger.check_integrity()
    assert (
        sum(ledger.prefixes._state_bytes.values()) == layout.link_state_bytes(0, 20, resumable=False) <= limit
    )
    most = limit // layout.link_state_bytes(0, 4, resumable=False)
    for n in range(2 * most):
        third = Played(local)
        third.step(4)
        ledger.prefix_rows.remember(third.slot, 0, bytes([n]), (n,) * 4)
        ledger.close(third.slot)
        local.sync()
        ledger.check_integrity()
    assert local.paged.states.prefixes == set(ledger.prefixes._state_bytes)
    ledger.prefixes.clear()
    local.sync()
    assert not local.paged.states.prefixes


@pytest.mark.parametrize(
    "wide", [WIDE, WideParts(sinks=4), WideParts(recent=5, dtype="float32"), WideParts(layers=2)]
)
def test_wide_kvs_are_counted(wide: WideParts) -> None:
    layout = replace(CacheLayout.even(3, HEADS, DIM, 4, "int8", 1), wide=wide)
    size = CacheSize.fit(layout, 60_000, 3, 100)
    cache, ledger = PagedCache.allocate(layout, size), Ledger(layout, size)
    assert cache.nbytes + ledger.nbytes + size.prefix_state_bytes(layout) == size.nbytes(layout) <= 60_000
    assert (
        size.num_blocks
        < CacheSize.fit(CacheLayout.even(3, HEADS, DIM, 4, "int8", 1), 60_000, 3, 100).num_blocks
    )


def test_bytes_by_hand() -> None:
    """64 positions of a whole layer, 5 places in each of two; keys and values of two heads, and a position."""
    assert open_cache().paged.windows[0].k.shape == (3, 1, HEADS, 64, DIM)
    layout = open_cache().paged.pool.layout
    assert layout.wide_bytes(64) == (64 + 2 * 5) * (2 * 2 * 8 * 2 + 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, WideParts()),
        ("layers=1,sinks=4,recent=64", WideParts(1, 4, 64)),
        ("recent=8, sinks=0", WideParts(0, 0, 8)),
    ],
)
def test_parts_are_named(text: str | None, expected: WideParts) -> None:
    assert WideParts.parse(text) == expected == WideParts.parse(str(expected) or None)


@pytest.mark.parametrize(
    "text", ["4", "sinks", "sinks=x", "sinks=-1", "sinks=1,sinks=2", "heads=2", "", "recent=9999999"]
)
def test_other_parts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_wide must be parts with counts, such as layers=1,.* got "):
        WideParts.parse(text)
