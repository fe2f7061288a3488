"""Keys on the device, values on a tier: the plain-torch attention against a loop over queries and KVs."""

import pytest
import torch
from tests.attention.paged import PagedBatch, paged_batch
from torch import Tensor

from winnow.attention import (
    AttentionBackend,
    AttentionObserver,
    AttentionSpec,
    PagedCache,
    RankedRows,
    ReferenceBackend,
    open_backend,
)
from winnow.cache import make_codec
from winnow.values.kv_dtype import KVDtype

SPEC = AttentionSpec(scale=0.25)
BACKENDS = [ReferenceBackend(), open_backend("auto")]
COUNTS = (1, 1, 5, 1)


def attend(batch: PagedBatch, spec: AttentionSpec = SPEC, backend: AttentionBackend = BACKENDS[0]) -> Tensor:
    backend.prepare(batch.cache, batch.spans).write(batch.layer, batch.k, batch.v)
    return backend.prepare(batch.cache, batch.spans).attend(batch.layer, batch.q, spec)


def by_hand(
    batch: PagedBatch, spec: AttentionSpec, top_n: int, renormalize: bool = False
) -> tuple[Tensor, int, int]:
    """The output for each query, and over all that choose: their number, and how many values they choose."""
    cache, spans = batch.cache, batch.spans
    pool, heads = cache.pool, cache.pool.layout.num_kv_heads
    out = torch.empty(batch.q.shape)
    chosen = choosing = 0
    for token in range(len(batch.q)):
        sequence = int(spans.token_sequence[token])
        slot, position = int(spans.slots[sequence]), int(spans.position[token])
        for query_head in range(batch.q.shape[1]):
            head = query_head // (batch.q.shape[1] // heads)
            length = int(cache.tables.lengths[slot, batch.layer, head])
            table = cache.tables.lookup(
                torch.tensor([slot]), batch.layer, -(-length // pool.layout.block_size)
            )
            slots = pool.numbers.slots_of(table[0, head].long())[:length]
            at = pool.position[pool.numbers.place(slots)]
            seen = (at <= position) & (position - at < (spec.window or 2**30))
            k, v = pool.of_layer(-1).keys(slots[seen]), pool.of_layer(-1).values(slots[seen])
            logits = k @ batch.q[token, query_head].float() * spec.scale
            if spec.softcap is not None:
                logits = spec.softcap * torch.tanh(logits / spec.softcap)
            sink = torch.empty(0) if spec.sinks is None else spec.sinks[query_head, None].float()
            p = torch.cat([logits, sink]).softmax(0)[: len(logits)]
            if position >= spans.select_from[sequence]:
                best = p.argsort(descending=True)[:top_n]
                choosing, chosen = choosing + 1, chosen + len(best)
                scale = p.sum() / p[best].sum() if renormalize else 1.0
                p = torch.zeros_like(p).scatter(0, best, p[best] * scale)
            out[token, query_head] = p @ v
    return out, choosing, chosen


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_n", [1, 7, 10**6])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_the_values_that_weigh_most(backend: AttentionBackend, top_n: int, renormalize: bool) -> None:
    spec = AttentionSpec(scale=0.3, window=150, softcap=20.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    batch = paged_batch(top_n, COUNTS, value_tier=f"host:N={top_n}{',as-softmaxed' * (not renormalize)}")
    found = attend(batch, spec, backend)
    expected, choosing, chosen = by_hand(batch, spec, top_n, renormalize)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    traffic = batch.cache.pool.of_layer(-1).traffic
    assert (traffic.head_queries, traffic.rows_selected) == (choosing, chosen)
    assert traffic.rows_selected <= choosing * top_n
    # Heads of a group, and tokens of a chunk, may share what they choose.
    assert chosen // choosing <= traffic.rows_read <= chosen


@pytest.mark.parametrize(
    "kv_format", ["float32", "bfloat16", "int8", "k=int8,v=int4", "int4-outlier", "int2"]
)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_enough_values_are_exact(backend: AttentionBackend, kv_format: str) -> None:
    codec = make_codec(KVDtype.parse(kv_format))
    with_tier = paged_batch(3, COUNTS, kv_dtype=codec, value_tier="host:N=1000")
    without = paged_batch(3, COUNTS, kv_dtype=codec)
    found, expected = attend(with_tier, backend=backend), attend(without)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_triton_reads_near_layers_by_kernels_and_far_ones_in_torch(layers: int) -> None:
    """Layer 1 is far with L = 1, and near with L = 2."""
    triton = pytest.importorskip("winnow.attention.triton")
    batch = paged_batch(2, COUNTS, value_tier=f"host:L={layers},N=7")
    found = attend(batch, backend=triton.TritonBackend())
    expected = by_hand(batch, SPEC, 7, renormalize=True)[0] if layers == 1 else attend(paged_batch(2, COUNTS))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    pool = batch.cache.pool
    source, target = torch.tensor([0, 5]), torch.tensor([9, 2])
    for kind in pool.kinds:
        kind.write(source + kind.first * 4, *torch.randn(2, len(source), 16), torch.arange(len(source)))
    expected = [
        (kind.keys(source + kind.first * 4), kind.values(source + kind.first * 4)) for kind in pool.kinds
    ]
    moves = (torch.cat([x + kind.first * 4 for kind in pool.kinds]) for x in (source, target))
    triton.TritonBackend().compact(pool, *moves)
    for kind, (k, v) in zip(pool.kinds, expected, strict=True):
        moved = target + kind.first * 4
        assert torch.equal(kind.keys(moved), k) and torch.equal(kind.values(moved), v)


def test_prompts_read_all_values_whatever_n() -> None:
    batch = paged_batch(5, COUNTS, value_tier="host:N=1", answers=False)
    torch.testing.assert_close(attend(batch), attend(paged_batch(5, COUNTS)))
    traffic = batch.cache.pool.of_layer(-1).traffic
    assert traffic.rows_read == traffic.head_queries == 0
    assert traffic.rows_prefilled == int(batch.cache.tables.lengths[:, batch.layer].sum())
    assert traffic.bytes_read == traffic.rows_prefilled * 16 * 4


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_accumulators_see_all_weights(backend: AttentionBackend) -> None:
    observe = [AttentionObserver()] * len(COUNTS)
    batch = paged_batch(6, COUNTS, observe=observe, value_tier="host:N=3")
    other = paged_batch(6, COUNTS, observe=observe)
    attend(batch, backend=backend)
    attend(other)
    for mine, theirs in zip(rows_of(batch), rows_of(other), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def rows_of(batch: PagedBatch) -> list[Tensor]:
    """The accumulators of each row."""
    pool, tables = batch.cache.pool, batch.cache.tables
    found = []
    for slot in batch.spans.slots.tolist():
        for head, length in enumerate(tables.lengths[slot, batch.layer].tolist()):
            table = tables.lookup(torch.tensor([slot]), batch.layer, -(-length // pool.layout.block_size))
            slots = pool.numbers.slots_of(table[0, head].long())[:length]
            found.append(pool.accumulators.flatten(1)[0, slots])
    return found


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_what_is_evicted_leaves_both_tiers(backend: AttentionBackend) -> None:
    """KVs of near and far rows move together with their values, wherever these lie."""
    batch = paged_batch(7, COUNTS, value_tier="host:N=4")
    attend(batch)
    cache = batch.cache
    slots = torch.from_numpy(batch.spans.slots)
    longest = int(batch.spans.lengths.max())
    block = cache.tables.lookup_layers(slots, -(-longest // 4)).long()  # [L, B, H, blocks]
    length = cache.tables.lengths[slots].transpose(0, 1).contiguous()
    slot = cache.pool.numbers.slots_of(block)
    valid = torch.arange(slot.shape[-1]) < length[..., None]
    fresh = slot[0][valid[0]]  # the batch fills the far layer alone
    k, v = torch.randn(2, len(fresh), 16, generator=torch.Generator().manual_seed(2))
    cache.pool.of_layer(0).write(fresh, k, v, torch.arange(len(fresh)))
    position = cache.pool.numbers.positions_of(block)
    score = torch.rand(position.shape, generator=torch.Generator().manual_seed(1))
    rows = RankedRows(block, length, position, score, torch.zeros_like(score, dtype=torch.bool))
    kept = length.long() // 3
    before = {layer: contents(cache, layer, slot[layer], rows.valid[layer]) for layer in range(2)}
    backend.keep_best(cache.pool, rows, kept, int((length - kept).max()))
    stays = torch.arange(score.shape[-1]) < kept[..., None]
    for layer in range(2):
        after = contents(cache, layer, slot[layer], stays[layer])
        assert after.keys() == set(
            best(before[layer], position[layer], score[layer], rows.valid[layer], kept[layer])
        )
        for kv, (k, v) in after.items():
            assert torch.equal(k, before[layer][kv][0]) and torch.equal(v, before[layer][kv][1])


Kvs = dict[tuple[int, int, int], tuple[Tensor, Tensor]]


def contents(cache: PagedCache, layer: int, slot: Tensor, valid: Tensor) -> Kvs:
    """Keys and values by row and position."""
    position, pool = cache.pool.position.flatten(), cache.pool.of_layer(layer)
    return {
        (b, h, int(position[slot[b, h, n]])): (pool.keys(slot[b, h, n]), pool.values(slot[b, h, n]))
        for b, h, n in valid.nonzero().tolist()
    }


def best(
    kvs: Kvs, position: Tensor, score: Tensor, valid: Tensor, kept: Tensor
) -> list[tuple[int, int, int]]:
    found = []
    for b in range(len(kept)):
        for h in range(kept.shape[1]):
            held = valid[b, h].nonzero()[:, 0].tolist()
            held.sort(key=lambda n: -float(score[b, h, n]))
            found += [(b, h, int(position[b, h, n])) for n in held[: int(kept[b, h])]]
    return found
